//! Checks outputs during a race: fresh random inputs and the oracle's outputs for them.
//!
//! All rows of a small problem are judged. The f64 oracle would take minutes for a large problem, so blocks
//! of rows are judged: the first, the last, and some at random places that differ for each draw. Every output
//! element must also be a number, because the output was filled with NaN before.

use std::ops::Range;

use judge::operands::draw_others;
use judge::outputs::ErrorFigures;
use judge::outputs::References;
use judge::values::{Inputs, Values};
use oracle::Reference;
use problem::{Band, Corner, KeyRange, Layout, Operand, Problem, ProblemError, Score, Tensor};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use rayon::prelude::*;

use super::Origin;
use super::fault::TimingFault;

/// The problem with all tensors dense as `[batch, head, row, dim]`. Inputs are drawn and outputs are judged
/// in this order.
pub fn dense(problem: &Problem) -> Problem {
    problem.clone().with_layout(Layout::Bhsd)
}

/// Maximum number of FLOP that the oracle may spend on one draw; the whole reference problem fits.
const ORACLE_FLOPS: f64 = 6e8;
/// Rows per block of a large problem. A problem so long that a block would cost the oracle many times
/// `ORACLE_FLOPS` takes `LONG_BLOCK_ROWS`.
const BLOCK_ROWS: usize = 32;
const LONG_BLOCK_ROWS: usize = 8;
/// Maximum number of blocks of a large problem.
const MOST_BLOCKS: usize = 32;
/// Tolerance factor of a peer on top of the error model. Libraries may round differently but must compute the
/// same function.
const PEER_SLACK: f64 = 4.0;

/// Random Q, K and V with the oracle's output for them.
pub struct Answer {
    /// The inputs, dense.
    pub inputs: Inputs,
    blocks: Vec<Block>,
    /// Elements of an output row.
    dim: usize,
}

/// Rows with the oracle's output for them.
struct Block {
    /// The output elements, a range for each run of rows.
    elements: Vec<Range<usize>>,
    references: References,
}

/// Some rows of one head with the outputs of the oracle and of standard attention for them.
struct Part {
    elements: Range<usize>,
    oracle: Reference,
    standard: Reference,
}

impl Part {
    /// Whether a row sees a key.
    fn sees(&self) -> bool {
        self.oracle.lse.iter().any(|lse| lse.is_finite())
    }
}

impl Answer {
    /// Draws inputs from the seed and computes the oracle's output.
    ///
    /// # Errors
    /// When the oracle rejects the problem.
    pub fn draw(problem: &Problem, seed: u64) -> Result<Answer, ProblemError> {
        let problem = dense(problem);
        problem.check()?;
        let inputs = normal_inputs(&problem, seed);
        if Answer::is_whole(&problem) {
            let references = References::of(&problem, &inputs)?.of_gpu(&problem);
            let elements = std::iter::once(0..references.elements()).collect();
            let whole = Block { elements, references };
            return Ok(Answer { inputs, blocks: vec![whole], dim: problem.head_dim_v });
        }
        let rows = block_rows(&problem);
        let places = places(&problem, rows, seed).into_iter();
        let runs: Vec<_> = places
            .flat_map(|(batch, head, row)| {
                let runs = runs(&problem, row, rows).into_iter();
                runs.map(move |(row, rows)| (batch, head, row, rows))
            })
            .collect();
        let parts: Vec<Part> = runs
            .into_par_iter()
            .map(|(batch, head, row, rows)| part(&problem, &inputs, batch, head, row, rows))
            .collect::<Result<_, _>>()?;
        let blocks = groups(&problem, parts).into_iter().map(|parts| judged(&problem, parts)).collect();
        Ok(Answer { inputs, blocks, dim: problem.head_dim_v })
    }

    pub fn is_whole(problem: &Problem) -> bool {
        problem.flops() <= ORACLE_FLOPS
    }

    /// Number of rows that are judged.
    pub fn rows(&self) -> usize {
        self.blocks.iter().map(|block| block.references.elements() / self.dim).sum()
    }

    /// Judges a dense output.
    ///
    /// # Errors
    /// [`TimingFault::Unwritten`] and [`TimingFault::Wrong`].
    pub fn judge(&self, out: &Values, origin: Origin) -> Result<ErrorFigures, TimingFault> {
        let unwritten = out.count_nan();
        if unwritten > 0 {
            return Err(TimingFault::Unwritten { elements: unwritten, of: out.len() });
        }
        let figures = self.blocks.iter().map(|block| {
            // An output that is too short cannot be judged.
            if block.elements.iter().any(|range| range.end > out.len()) {
                return Err(TimingFault::short(out.len()));
            }
            let elements = block.elements.iter().cloned().flatten();
            Ok(match out {
                // The problem's output has 16 bits or more; cuDNN's 8-bit attention writes e4m3.
                Values::E4m3(out) => {
                    let bounds: Vec<_> = elements.map(|i| out[i].rounded_from()).collect();
                    block.references.judge_bounds(&bounds)
                }
                _ => {
                    let values: Vec<f64> = elements.filter_map(|i| out.get(i)).map(f64::from).collect();
                    block.references.judge(&values, None)
                }
            })
        });
        let mut worst = ErrorFigures { allclose_1e3: true, ..ErrorFigures::default() };
        for figures in figures {
            worst = worst.worst(figures?);
        }
        let bounds = match origin {
            Origin::Ours => worst,
            Origin::Peer => worst.with_slack(PEER_SLACK),
        };
        match bounds.reasons() {
            reasons if reasons.is_empty() => Ok(worst),
            reasons => Err(TimingFault::Wrong { reasons: reasons.join("; ") }),
        }
    }
}

/// FLOP of a row of the output.
fn row_flops(problem: &Problem) -> f64 {
    problem.flops() / (problem.batch * problem.heads_q * problem.seq_q) as f64
}

fn block_rows(problem: &Problem) -> usize {
    let long = row_flops(problem) * BLOCK_ROWS as f64 > 10.0 * ORACLE_FLOPS;
    if long { LONG_BLOCK_ROWS } else { BLOCK_ROWS }
}

/// Batch, head and first row of each block of `rows` rows.
fn places(problem: &Problem, rows: usize, seed: u64) -> Vec<(usize, usize, usize)> {
    let blocks = (ORACLE_FLOPS / (row_flops(problem) * rows as f64)) as usize;
    let last = problem.seq_q.saturating_sub(rows);
    let mut rng = SmallRng::seed_from_u64(seed ^ 0x706c_6163_6573);
    let drawn = (2..blocks.clamp(4, MOST_BLOCKS)).map(|_| {
        let (batch, head) = (rng.random_range(0..problem.batch), rng.random_range(0..problem.heads_q));
        (batch, head, rng.random_range(0..=last))
    });
    [(0, 0, 0), (problem.batch - 1, problem.heads_q - 1, last)].into_iter().chain(drawn).collect()
}

/// Splits rows `row..row + rows` into runs that are judged together: rows that see keys, and rows that see
/// none. Gives the first row and the length of each run.
fn runs(problem: &Problem, row: usize, rows: usize) -> Vec<(usize, usize)> {
    let sees_none = |row: &usize| problem.band.keys(*row, problem.seq_q, problem.seq_kv).is_empty();
    let rows: Vec<usize> = (row..(row + rows).min(problem.seq_q)).collect();
    rows.chunk_by(|a, b| sees_none(a) == sees_none(b)).map(|run| (run[0], run.len())).collect()
}

/// The runs that are judged together. 8-bit probabilities have independent errors of up to 2^-4. The mean and
/// the largest error of a few rows then differ from those of standard attention by more than a factor of two,
/// so that all rows that see keys are judged together.
fn groups(problem: &Problem, parts: Vec<Part>) -> Vec<Vec<Part>> {
    if !problem.dtypes.v.is_fp8() {
        return parts.into_iter().map(|part| vec![part]).collect();
    }
    let (seeing, blind): (Vec<Part>, Vec<Part>) = parts.into_iter().partition(Part::sees);
    [seeing, blind].into_iter().filter(|group| !group.is_empty()).collect()
}

/// Runs of rows that are judged together.
fn judged(problem: &Problem, parts: Vec<Part>) -> Block {
    let mut elements = Vec::new();
    let nothing = || Reference { out: Vec::new(), lse: Vec::new(), deviation: Vec::new() };
    let (mut oracle, mut standard) = (nothing(), nothing());
    for part in parts {
        elements.push(part.elements);
        for (all, of) in [(&mut oracle, part.oracle), (&mut standard, part.standard)] {
            all.out.extend(of.out);
            all.lse.extend(of.lse);
            all.deviation.extend(of.deviation);
        }
    }
    Block { elements, references: References::new(problem, oracle, &standard).of_gpu(problem) }
}

/// A run of rows from `row` on as a problem of its own. Its keys reach from the first key of the first row
/// to the last key of the last row.
fn part(
    problem: &Problem,
    inputs: &Inputs,
    batch: usize,
    head: usize,
    row: usize,
    rows: usize,
) -> Result<Part, ProblemError> {
    let (seq_q, seq_kv) = (problem.seq_q, problem.seq_kv);
    let range = |row| problem.band.keys(row, seq_q, seq_kv);
    let keys = KeyRange { start: range(row).start, end: range(row + rows - 1).end };
    // The key, counted within the block, on the diagonal of the first row.
    let level = row as i64 + problem.band.shift(seq_q, seq_kv) - keys.start as i64;
    let bound = |keys: i64| u32::try_from(keys.max(0)).unwrap_or(u32::MAX);
    let band = Band {
        corner: Corner::TopLeft,
        before: problem.band.before.map(|before| bound(i64::from(before) - level)),
        after: problem.band.after.map(|after| bound(i64::from(after) + level)),
    };
    let part = Problem {
        heads_q: 1,
        heads_kv: 1,
        seq_q: rows,
        seq_kv: keys.len(),
        batch: 1,
        band: band.aligned(Corner::TopLeft),
        score: Score { scale: Some(problem.softmax_scale()), ..problem.score },
        ..problem.clone()
    };
    let part = dense(&part);
    let from = |tensor: Tensor, head: usize, row: usize, rows: usize| {
        let [_, heads, all, dim] = problem.extents(tensor);
        let start = ((batch * heads + head) * all + row) * dim;
        start..start + rows * dim
    };
    let kv_head = head / problem.group_size();
    let operands = inputs.operands.map(|operand, values| match operand {
        Operand::Tensor(tensor @ (Tensor::K | Tensor::V)) => {
            values.slice(from(tensor, kv_head, keys.start, keys.len()))
        }
        Operand::Tensor(tensor) => values.slice(from(tensor, head, row, rows)),
        _ => values.clone(),
    });
    let inputs = Inputs { operands };
    let [oracle, standard] = References::outputs(&part, &inputs, None)?;
    Ok(Part { elements: from(Tensor::Out, head, row, rows), oracle, standard })
}

/// Independent standard normal draws. Each run of elements has its own random stream, so that all cores draw.
pub(super) fn normal_inputs(problem: &Problem, seed: u64) -> Inputs {
    const RUN: usize = 1 << 14;
    let tensor = |tensor: Tensor, stream: u64| {
        let elements: usize = problem.extents(tensor).iter().product();
        let mut data = vec![0.0f32; elements];
        data.par_chunks_mut(RUN).enumerate().for_each(|(run, data)| {
            let mixed = (seed.wrapping_mul(4) + stream).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let mut rng = SmallRng::seed_from_u64(mixed ^ (run as u64) << 20);
            for pair in data.chunks_mut(2) {
                // The Box–Muller transform gives two values at a time.
                let radius = (-2.0 * (1.0 - rng.random::<f32>()).ln()).sqrt();
                let (sin, cos) = (std::f32::consts::TAU * rng.random::<f32>()).sin_cos();
                pair[0] = radius * cos;
                pair.iter_mut().skip(1).for_each(|x| *x = radius * sin);
            }
        });
        Values::round(problem.dtypes.of(tensor), &data)
    };
    let mut operands = draw_others(problem, seed);
    operands.extend(
        [(Tensor::Q, 1), (Tensor::K, 2), (Tensor::V, 3)].map(|(of, stream)| (of.into(), tensor(of, stream))),
    );
    Inputs { operands }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cpu::CpuPlan;
    use problem::DType;

    fn attention(problem: &Problem, inputs: &Inputs) -> Values {
        inputs.attention(problem, &CpuPlan::for_problem(problem)).unwrap().0
    }

    #[test]
    fn draws_are_normal_independent_and_repeatable() {
        let problem = Problem::new(1, 2, 512, 64, DType::F32);
        let inputs = normal_inputs(&problem, 3);
        assert_eq!(inputs, normal_inputs(&problem, 3));
        assert_ne!(inputs[Operand::Q], normal_inputs(&problem, 4)[Operand::Q]);
        assert_ne!(inputs[Operand::Q], inputs[Operand::K]);
        let moment = |power: i32| {
            let v = &inputs[Operand::V];
            let values = (0..v.len()).filter_map(|i| v.get(i));
            values.map(|x| f64::from(x).powi(power)).sum::<f64>() / v.len() as f64
        };
        assert!(moment(1).abs() < 0.02 && (moment(2) - 1.0).abs() < 0.03 && (moment(4) - 3.0).abs() < 0.3);
    }

    /// Rows of 8-bit problems are judged together, and a wrong row is still found.
    #[test]
    fn a_large_problem_with_8_bit_inputs_is_judged_as_one() {
        let problem = Problem::new(6, 4, 640, 64, DType::E4m3).with_band(Band::CAUSAL_TOP_LEFT);
        let problem = problem.with_seq_kv(900, Layout::Bhsd);
        let answer = Answer::draw(&problem, 1).unwrap();
        assert!(answer.blocks.len() == 1 && (4 * BLOCK_ROWS..6 * 4 * 640).contains(&answer.rows()));
        let out = attention(&problem, &answer.inputs);
        answer.judge(&out, Origin::Ours).unwrap();
        let Values::Bf16(right) = &out else { unreachable!() };
        let mut wrong = right.clone();
        wrong.copy_within(64..128, 0);
        let fault = answer.judge(&Values::Bf16(wrong), Origin::Ours).unwrap_err();
        assert!(matches!(fault, TimingFault::Wrong { .. }), "{fault}");
    }

    #[test]
    fn an_output_in_e4m3_is_judged_by_what_rounds_to_it() {
        let problem = Problem::new(1, 2, 64, 64, DType::E4m3);
        let answer = Answer::draw(&problem, 1).unwrap();
        let out = attention(&problem, &answer.inputs);
        let values: Vec<f32> = (0..out.len()).filter_map(|i| out.get(i)).collect();
        let rounded = Values::round(DType::E4m3, &values);
        answer.judge(&rounded, Origin::Peer).unwrap();
        let wrong: Vec<f32> = values.iter().map(|x| 1.3 * x).collect();
        let fault = answer.judge(&Values::round(DType::E4m3, &wrong), Origin::Peer).unwrap_err();
        assert!(matches!(fault, TimingFault::Wrong { .. }), "{fault}");
    }

    #[test]
    fn blocks_of_a_very_long_problem_are_short() {
        let rows = |seq| block_rows(&Problem::new(1, 1, seq, 128, DType::Bf16));
        assert_eq!((rows(131_072), rows(1 << 20)), (BLOCK_ROWS, LONG_BLOCK_ROWS));
        assert_eq!(places(&Problem::new(1, 1, 1 << 20, 128, DType::Bf16), LONG_BLOCK_ROWS, 1).len(), 4);
    }

    #[test]
    fn a_large_problem_is_judged_by_blocks_as_if_whole() {
        let top_left = Band::CAUSAL_TOP_LEFT;
        let window = Band::window(450, 60);
        let masks = [(Band::FULL, 700), (Band::CAUSAL, 700), (top_left, 700), (top_left, 560), (window, 700)];
        for (mask, keys) in masks.into_iter().chain([(window.aligned(Corner::TopLeft), 700)]) {
            let problem = Problem::new(2, 4, 640, 96, DType::F16).with_band(mask);
            let problem = problem.with_heads_kv(2, Layout::Bhsd).with_seq_kv(keys, Layout::Bhsd);
            let answer = Answer::draw(&problem, 1).unwrap();
            assert!(answer.blocks.len() >= 4 && answer.rows() < 2 * 4 * 640);
            let out = attention(&problem, &answer.inputs);
            answer.judge(&out, Origin::Ours).unwrap();
            // Three faulty outputs: the output for other inputs, an overwritten row in the first block, and
            // an unwritten element.
            let stale = attention(&problem, &Answer::draw(&problem, 2).unwrap().inputs);
            assert!(matches!(answer.judge(&stale, Origin::Peer), Err(TimingFault::Wrong { .. })));
            let Values::F16(right) = &out else { unreachable!() };
            let mut wrong = right.clone();
            wrong.copy_within(96..192, 0);
            assert!(matches!(
                answer.judge(&Values::F16(wrong), Origin::Ours),
                Err(TimingFault::Wrong { .. })
            ));
            let mut holed = right.clone();
            *holed.last_mut().unwrap() = half::f16::NAN;
            let fault = answer.judge(&Values::F16(holed), Origin::Ours).unwrap_err();
            assert_eq!(fault, TimingFault::Unwritten { elements: 1, of: right.len() });
        }
    }
}
