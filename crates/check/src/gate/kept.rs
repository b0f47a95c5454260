//! The inputs and the references that a thread used last. The plans, candidates and mutants of one problem
//! have equal ones, whose computation takes as long as a run.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::sync::Arc;

use judge::inputs::{Style, draw};
use judge::outputs::References;
use judge::values::Inputs;
use problem::{Problem, ProblemError};

/// The most bytes that a thread keeps, of problems that are small.
const LIMIT: usize = 64 << 20;
/// Bytes of references for a byte of outputs: each 16-bit element has a number and a deviation in f64.
const REFERENCE: usize = 10;

struct Kept {
    problem: Problem,
    style: Style,
    seed: u64,
    inputs: Arc<Inputs>,
    references: Option<Arc<References>>,
    /// The size of both.
    bytes: usize,
}

/// The size of a problem's inputs and references.
fn size(problem: &Problem) -> usize {
    let inputs: usize = problem.inputs().map(|spec| spec.bytes()).sum();
    inputs + REFERENCE * problem.outputs().map(|spec| spec.bytes()).sum::<usize>()
}

thread_local! {
    /// The last ones, the latest at the end.
    static LAST: RefCell<VecDeque<Kept>> = const { RefCell::new(VecDeque::new()) };
}

/// The inputs of a problem, as [`draw`] draws them.
pub(super) fn inputs(problem: &Problem, style: Style, seed: u64) -> Arc<Inputs> {
    let is_wanted = |kept: &&Kept| (kept.style, kept.seed) == (style, seed) && kept.problem == *problem;
    let known = LAST.with_borrow(|last| last.iter().rev().find(is_wanted).map(|kept| kept.inputs.clone()));
    if let Some(inputs) = known {
        return inputs;
    }
    let inputs = Arc::new(draw(problem, style, seed));
    let bytes = size(problem);
    if bytes <= LIMIT {
        LAST.with_borrow_mut(|last| {
            let mut all = bytes + last.iter().map(|kept| kept.bytes).sum::<usize>();
            while all > LIMIT {
                all -= last.pop_front().map_or(all, |oldest| oldest.bytes);
            }
            let (problem, inputs) = (problem.clone(), inputs.clone());
            last.push_back(Kept { problem, style, seed, inputs, references: None, bytes });
        });
    }
    inputs
}

/// The references of a GPU for inputs of a problem, which [`inputs`] may have returned.
///
/// # Errors
/// When the oracle rejects the problem.
pub(super) fn references(problem: &Problem, inputs: &Arc<Inputs>) -> Result<Arc<References>, ProblemError> {
    let is_of = |kept: &Kept| Arc::ptr_eq(&kept.inputs, inputs) && kept.problem == *problem;
    let known = LAST.with_borrow(|last| last.iter().find(|kept| is_of(kept))?.references.clone());
    if let Some(references) = known {
        return Ok(references);
    }
    let references = Arc::new(References::of(problem, inputs)?.of_gpu(problem));
    LAST.with_borrow_mut(|last| {
        if let Some(kept) = last.iter_mut().find(|kept| is_of(kept)) {
            kept.references = Some(references.clone());
        }
    });
    Ok(references)
}

#[cfg(test)]
mod tests {
    use problem::{DType, DTypes};

    use super::*;

    #[test]
    fn equal_inputs_are_drawn_once_and_others_are_not_mixed_up() {
        let problem = Problem::new(1, 2, 40, 32, DType::F32);
        let first = inputs(&problem, Style::Normal, 1);
        assert!(Arc::ptr_eq(&first, &inputs(&problem, Style::Normal, 1)));
        for (style, seed) in [(Style::Normal, 2), (Style::Rising, 1)] {
            assert_ne!(first, inputs(&problem, style, seed));
        }
        let of_first = references(&problem, &first).unwrap();
        assert!(Arc::ptr_eq(&of_first, &references(&problem, &first).unwrap()));
        // Another problem has other references for equal inputs.
        let coarse = Problem { dtypes: DTypes::TF32, ..problem.clone() };
        assert!(!Arc::ptr_eq(&of_first, &references(&coarse, &first).unwrap()));
        // Equal inputs of another origin.
        let others = Arc::new(Inputs::clone(&first));
        assert!(!Arc::ptr_eq(&of_first, &references(&problem, &others).unwrap()));
    }

    #[test]
    fn the_oldest_make_room() {
        let problem = Problem::new(1, 8, 1024, 64, DType::Bf16);
        let count = LIMIT / size(&problem);
        let first = inputs(&problem, Style::Normal, 0);
        (1..=count as u64).for_each(|seed| drop(inputs(&problem, Style::Normal, seed)));
        assert!(!Arc::ptr_eq(&first, &inputs(&problem, Style::Normal, 0)));
        let large = Problem::new(1, 64, 4096, 64, DType::Bf16);
        assert!(size(&large) > LIMIT);
        LAST.with_borrow(|last| assert!(last.iter().map(|kept| kept.bytes).sum::<usize>() <= LIMIT));
    }
}
