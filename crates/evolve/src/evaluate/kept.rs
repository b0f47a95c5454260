//! The evaluators of a process that accepts tasks for any target.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use super::Evaluator;
use crate::faults::is_lost;
use crate::task::{Outcome, Target, Task};

/// One evaluator per target. It is created with the target's first task, and again after it lost its device.
#[derive(Default)]
pub struct Evaluators(HashMap<Target, Box<dyn Evaluator>>);

impl Evaluators {
    /// Evaluates a task. `make` creates an evaluator for a target.
    ///
    /// # Errors
    /// The error of `make`.
    pub fn evaluate<E>(
        &mut self,
        task: &Task,
        make: impl FnOnce(&Target) -> Result<Box<dyn Evaluator>, E>,
    ) -> Result<Outcome, E> {
        let evaluator = match self.0.entry(task.target.clone()) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(free) => free.insert(make(&task.target)?),
        };
        let outcome = evaluator.evaluate(task);
        if is_lost(&outcome) {
            self.0.remove(&task.target);
        }
        Ok(outcome)
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use kernels::select::Shape;
    use problem::Problem;

    use super::*;
    use crate::evaluate::Look;
    use crate::{Candidate, KernelText, Language, Stage};
    use ledger::{CandidateId, Environment, Reason, Rejection};

    /// Rejects each candidate for the reason that its text names.
    struct Refusing;

    impl Evaluator for Refusing {
        fn look(&mut self, task: &Task) -> Result<Look, Rejection> {
            let Candidate::Kernel(source) = &task.subject else { panic!("a kernel") };
            let reason = Reason::named(&source.text).unwrap();
            Err(Rejection { stage: task.stage, reason, detail: String::new() })
        }

        fn environment(&self) -> Environment {
            Environment::default()
        }
    }

    #[test]
    fn one_that_lost_its_device_is_made_anew() {
        let (mut evaluators, mut made) = (Evaluators::default(), 0);
        let mut look = |ordinal, reason: &str| {
            let source = KernelText { language: Language::Ptx, text: reason.into(), launch: String::new() };
            let task = Task {
                candidate: CandidateId(1),
                stage: Stage::Microbench,
                target: Target::Cuda { ordinal },
                problem: Shape::of(&Problem::mission()),
                subject: Candidate::Kernel(source),
                incumbent: None,
                seconds: 0.0,
            };
            let make = |_: &Target| -> Result<Box<dyn Evaluator>, Infallible> {
                made += 1;
                Ok(Box::new(Refusing))
            };
            let Ok(_) = evaluators.evaluate(&task, make);
            made
        };
        let found = [(0, "wrong"), (0, "hangs"), (0, "wrong"), (1, "crashed"), (0, "wrong"), (1, "wrong")];
        assert_eq!(found.map(|(ordinal, reason)| look(ordinal, reason)), [1, 1, 2, 3, 3, 4]);
    }
}
