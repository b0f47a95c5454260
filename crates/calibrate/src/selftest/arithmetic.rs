//! Tests of tensor cores and approximations: bit for bit where the emulator claims to be exact, and elsewhere
//! within PTX's error bound.

use emu::numerics::tensor::TensorRules;
use ptx::{Machine, Target};

use super::{Check, Making, Settings};
use crate::approx::{Agreement, Subject};
use crate::differential;
use check::gate::Verdict;

pub fn tensor_cores<M: Machine>(
    machine: &mut M,
    target: Target,
    sm: u32,
    settings: &Settings,
    progress: &mut dyn FnMut(&Check),
) -> Vec<Check> {
    let mut making = Making::new("tensor cores", format!("mma.sync and wmma of sm_{sm}"));
    let Some(rules) = TensorRules::of_sm(sm) else {
        making.find(Verdict::Incomplete, format!("sm_{sm} has no rules"));
        return vec![making.done()];
    };
    for subject in differential::Subject::all(rules) {
        match differential::compare(machine, target, rules, subject, settings.fragments) {
            Ok(compared) => {
                making.check.cases += compared.fragments;
                if compared.differing > 0 {
                    let (d, n) = (compared.differing, compared.results);
                    making.fail(format!("{}: {d} of {n} results differ", compared.instruction));
                }
            }
            Err(error) => making.fail(error.to_string()),
        }
    }
    let check = making.done();
    progress(&check);
    vec![check]
}

/// Every `.approx` instruction, for every exponent.
pub fn approximations<M: Machine>(
    machine: &mut M,
    target: Target,
    sm: u32,
    settings: &Settings,
    progress: &mut dyn FnMut(&Check),
) -> Vec<Check> {
    let checks = Subject::all(sm).into_iter().map(|subject| {
        let check = approximation(machine, target, sm, subject, settings.mantissas);
        progress(&check);
        check
    });
    checks.collect()
}

fn approximation<M: Machine>(
    machine: &mut M,
    target: Target,
    sm: u32,
    subject: Subject,
    mantissas: u32,
) -> Check {
    let mut making = Making::new("approximations", subject.name());
    let inputs = subject.inputs(mantissas);
    let results = match subject.run(machine, target, &inputs) {
        Ok(results) => results,
        Err(error) => {
            making.fail(error.to_string());
            return making.done();
        }
    };
    let emulated = subject.emulated(&inputs);
    let agreement = Agreement::of(subject, &inputs, &results, &emulated);
    making.check.cases = agreement.results;
    let found = format!(
        "{} of {} differ from the emulator, at most {} ulp",
        agreement.differing, agreement.results, agreement.most_ulps
    );
    if subject.is_exact(sm) {
        if let Some(first) = &agreement.first {
            let (x, y, z) = (&first.input, &first.machine, &first.emulated);
            making.fail(format!("{found}; first {x}: {y}, emulated {z}"));
        }
        return making.done();
    }
    // Without an exact table of this architecture, PTX's bound applies.
    let outside =
        inputs.iter().zip(&results).zip(&emulated).filter(|((x, y), z)| !subject.admits(**x, **y, **z));
    let outside = outside.count();
    if outside > 0 {
        making.fail(format!("{outside} results are outside the bound of PTX"));
    }
    if agreement.differing > 0 {
        making.check.notes.push(found);
    }
    making.done()
}

#[cfg(test)]
mod tests {
    use emu::{Emulator, Options};

    use super::*;

    #[test]
    fn the_emulator_agrees_with_itself() {
        let settings = Settings { fragments: 4, mantissas: 2, ..Settings::quick() };
        let (target, mut emulator) = (Target::sm(90), Emulator::new(Options::default()));
        let mut seen = 0;
        let mut checks = tensor_cores(&mut emulator, target, 90, &settings, &mut |_| seen += 1);
        checks.extend(approximations(&mut emulator, target, 90, &settings, &mut |_| seen += 1));
        let failed: Vec<_> = checks.iter().filter(|c| c.verdict != Verdict::Passed).collect();
        assert!(failed.is_empty(), "{failed:#?}");
        assert_eq!(checks.len(), 1 + Subject::all(90).len());
        assert_eq!(checks.len(), seen);
    }
}
