//! The gate on a device: checks correct outputs on several draws of inputs, that every output element is
//! written and nothing else, and that repeated launches give identical bits.

use std::sync::Arc;

use judge::inputs::Style;
use judge::outputs::ErrorFigures;
use judge::outputs::References;
use judge::values::Values;
use ledger::Reason;
use problem::{Operand, Problem, Tensor};
use rayon::prelude::*;

use super::card::Card;
use crate::evaluate::subject::TaskFault;
use bench::{Answer, Origin, dense};
use check::gate::{Feed, Launched, Trial, TrialError, launch};
use check::launchfile::{Bound, Role};

/// Draws of a small problem: normal inputs, inputs whose row max moves along the keys, and outliers.
const DRAWS: [(Style, u64); 4] =
    [(Style::Normal, 1), (Style::Rising, 2), (Style::Falling, 3), (Style::Outlier, 3)];
/// Seeds for a large problem, of which only some rows are checked.
const SEEDS: [u64; 2] = [1, 2];
/// Number of repeated launches that must equal the first one bit for bit.
const REPEATS: usize = 2;
/// Number of problems whose inputs and references are kept.
const KEPT: usize = 3;

/// Inputs and references, drawn once per problem.
#[derive(Default)]
pub(super) struct Gate {
    known: Vec<(Problem, Vec<Case>)>,
}

struct Case {
    feed: Feed,
    truth: Truth,
}

enum Truth {
    /// References of all rows.
    Whole(Arc<References>),
    /// References of some rows.
    Rows(Answer),
}

/// The gate's result for a kernel that passed.
pub(super) struct Judged {
    /// The error of the worst draw.
    pub error: Option<ErrorFigures>,
    /// The buffers before a launch.
    pub contents: Vec<Vec<u8>>,
}

impl Gate {
    /// Draws inputs for a kernel's problem, unless they exist already.
    pub(super) fn prepare(&mut self, bound: &Bound) -> Result<(), TaskFault> {
        let problem = problem_of(bound)?;
        if self.known.iter().any(|(known, _)| known == problem) {
            return Ok(());
        }
        let refused = |error| TaskFault::new(Reason::Problem, error);
        let cases = if Answer::is_whole(problem) {
            let drawn = DRAWS.iter().filter_map(|&(style, seed)| Feed::draw(bound, style, seed));
            let cases = drawn.map(|feed| {
                let references = feed.references(bound).map_err(refused)?;
                let truth = Truth::Whole(
                    references.ok_or_else(|| TaskFault::new(Reason::Problem, "it has no answer"))?,
                );
                Ok(Case { feed, truth })
            });
            cases.collect::<Result<Vec<Case>, TaskFault>>()?
        } else {
            let cases = SEEDS.iter().map(|&seed| {
                let answer = Answer::draw(problem, seed).map_err(refused)?;
                let laid = answer.inputs.operands.map(|operand, values| match operand {
                    Operand::Tensor(tensor) => values.clone().scatter(problem, tensor),
                    _ => values.clone(),
                });
                let laid = judge::values::Inputs { operands: laid };
                Ok(Case { feed: Feed::of(laid), truth: Truth::Rows(answer) })
            });
            cases.collect::<Result<Vec<Case>, TaskFault>>()?
        };
        if self.known.len() == KEPT {
            self.known.remove(0);
        }
        self.known.push((problem.clone(), cases));
        Ok(())
    }

    /// Judges a kernel whose problem is prepared. A fault is the reason why the kernel fails.
    pub(super) fn judge<C: Card>(&mut self, card: &mut C, bound: &Bound) -> Result<Judged, TaskFault> {
        let problem = problem_of(bound)?;
        let cases = self.known.iter().find(|(known, _)| known == problem).map(|(_, cases)| cases.as_slice());
        let [first, ..] = cases.unwrap_or_default() else {
            return Err(TaskFault::new(Reason::Problem, "nothing was drawn for it"));
        };
        let cases = cases.unwrap_or_default();
        let feeds = cases.iter().map(|case| &case.feed).chain(std::iter::repeat_n(&first.feed, REPEATS));
        let runs = feeds.map(|feed| launch(card.machine(), bound, feed).map_err(lost::<C>));
        let mut runs = runs.collect::<Result<Vec<Launched>, TaskFault>>()?;
        let repeats = runs.split_off(cases.len());
        // The remaining work runs on the host.
        let judged: Vec<_> = cases.par_iter().zip(runs).map(|(case, run)| case.judge(bound, run)).collect();
        let (mut error, mut outputs) = (None::<ErrorFigures>, Vec::new());
        for judged in judged {
            let (run, found) = judged?;
            if outputs.is_empty() {
                outputs = run.outputs(bound);
            }
            error = match (error, found) {
                (Some(worst), Some(found)) => Some(worst.worst(found)),
                (worst, found) => worst.or(found),
            };
        }
        for (repeat, again) in (1..).zip(repeats) {
            if again.check(bound, &first.feed, None).outputs(bound) != outputs {
                let detail = format!("launch {repeat} on the same inputs gave other bits than the first");
                return Err(TaskFault::new(Reason::Wrong, detail));
            }
        }
        let contents = first.feed.buffers(bound).iter().map(emu::Buffer::to_bytes).collect();
        Ok(Judged { error, contents })
    }
}

fn problem_of(bound: &Bound) -> Result<&Problem, TaskFault> {
    bound
        .problem
        .as_ref()
        .ok_or_else(|| TaskFault::new(Reason::Problem, "the kernel states no problem to be judged by"))
}

fn lost<C: Card>(error: TrialError<<C::Machine as ptx::Machine>::Error>) -> TaskFault {
    match error {
        TrialError::Machine(error) => C::fault(error),
        TrialError::Oracle(error) => TaskFault::new(Reason::Problem, error),
    }
}

impl Case {
    /// Judges the result of one run; a fault when it is wrong.
    fn judge(&self, bound: &Bound, run: Launched) -> Result<(Trial, Option<ErrorFigures>), TaskFault> {
        let references = match &self.truth {
            Truth::Whole(references) => Some(references.as_ref()),
            Truth::Rows(_) => None,
        };
        let run = run.check(bound, &self.feed, references);
        if !run.is_right() {
            return Err(TaskFault::new(Reason::Wrong, run.reasons.join("; ")));
        }
        let Truth::Rows(answer) = &self.truth else {
            let error = run.error;
            return Ok((run, error));
        };
        let problem = problem_of(bound)?;
        let out = bound.roles.iter().position(|&role| role == Role::Operand(Operand::OUT));
        let Some(bytes) = out.map(|index| &run.after[index]) else {
            return Err(TaskFault::new(Reason::Launch, "it has no output"));
        };
        let values = Values::from_bytes(problem.dtypes.out, bytes).gather(problem, Tensor::Out);
        debug_assert_eq!(values.len(), dense(problem).span(Tensor::Out).map_or(0, |(elements, _)| elements));
        let figures =
            answer.judge(&values, Origin::Ours).map_err(|fault| TaskFault::new(Reason::Wrong, fault))?;
        Ok((run, Some(figures)))
    }
}
