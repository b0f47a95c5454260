//! Renumbers the labels of a body.

use crate::{Body, Label, Name, Operand, Statement};

impl Body {
    /// Replaces every label by `f(label)`. The names do not change.
    pub(crate) fn map_labels(&mut self, mut f: impl FnMut(Label) -> Label) {
        for statement in &mut self.statements {
            match statement {
                Statement::Label(label) => *label = f(*label),
                Statement::Inst(inst) => {
                    for operand in &mut inst.operands {
                        match operand {
                            Operand::Label(label) => *label = f(*label),
                            Operand::Labels(labels) => labels.iter_mut().for_each(|label| *label = f(*label)),
                            _ => {}
                        }
                    }
                }
                Statement::Pragma(_) => {}
            }
        }
    }

    /// Numbers the labels by their first mention and drops labels that are not mentioned. The parser numbers
    /// labels in this way. A built body needs the same numbers to equal the body that is parsed from its
    /// text.
    pub fn number_labels(&mut self) {
        let old = std::mem::take(&mut self.labels);
        let mut new: Vec<Option<Label>> = vec![None; old.len()];
        let mut names: Vec<Name> = Vec::with_capacity(old.len());
        self.map_labels(|label| match (new.get_mut(label.0 as usize), old.get(label.0 as usize)) {
            (Some(slot), Some(name)) => *slot.get_or_insert_with(|| {
                names.push(name.clone());
                Label(names.len() as u32 - 1)
            }),
            // The verifier reports a label without a name.
            _ => label,
        });
        self.labels = names;
    }
}
