//! Calls on rows of numbered sequences. The numbers of a row depend on its sequence and its position alone,
//! wherever the call stores it.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use judge::values::{Inputs, Values};
use problem::{
    Band, DTypes, Layout, LengthArray, Operand, OperandMap, Problem, SideLengths, Storage, Tensor,
};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

/// Query heads of a KV head.
pub const GROUP: usize = 3;
/// KV heads.
const HEADS: usize = 2;

/// The properties that all compared calls share.
#[derive(Clone, Debug)]
pub struct Case {
    pub dim: usize,
    pub dtypes: DTypes,
    pub band: Band,
    pub softcap: Option<f32>,
    pub sink: bool,
}

impl Case {
    /// Causal attention without other features.
    pub fn causal(dim: usize, dtypes: impl Into<DTypes>) -> Case {
        Case { dim, dtypes: dtypes.into(), band: Band::CAUSAL, softcap: None, sink: false }
    }
}

/// Rows of a sequence that a call computes. Its keys end with the last row, as in a cache.
#[derive(Clone, Debug)]
pub struct Part {
    pub sequence: u64,
    pub rows: Range<usize>,
}

/// Where keys and values are stored.
#[derive(Clone, Copy, Debug)]
pub enum Store {
    /// At strides, with room for more keys than the longest sequence has.
    Strided,
    /// One sequence after the other.
    Packed,
    /// In pages of so many rows.
    Pages(usize),
}

/// How queries are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Queries {
    /// Equally many rows of each sequence.
    Even,
    /// One sequence after the other.
    Packed,
}

/// One call.
#[derive(Clone, Debug)]
pub struct Call {
    pub case: Case,
    pub parts: Vec<Part>,
    pub store: Store,
    pub queries: Queries,
}

/// The bits of O and of the LSE of each sequence, head and row.
pub type Results = BTreeMap<(u64, usize, usize), (Vec<u8>, u32)>;

impl Call {
    pub fn new(case: &Case, parts: Vec<Part>, store: Store, queries: Queries) -> Call {
        Call { case: case.clone(), parts, store, queries }
    }

    /// One row of a sequence with so many keys.
    pub fn decode(case: &Case, sequences: &[(u64, usize)], store: Store) -> Call {
        let part = |&(sequence, keys): &(u64, usize)| Part { sequence, rows: keys - 1..keys };
        Call::new(case, sequences.iter().map(part).collect(), store, Queries::Even)
    }

    /// All rows of a sequence, in chunks: one call for each.
    pub fn prefill(case: &Case, (sequence, length): (u64, usize), chunk: usize, store: Store) -> Vec<Call> {
        let starts = (0..length).step_by(chunk);
        let part = |start: usize| Part { sequence, rows: start..(start + chunk).min(length) };
        let call = |start| Call::new(case, vec![part(start)], store, Queries::Even);
        starts.map(call).collect()
    }

    pub fn problem(&self) -> Problem {
        let Case { dim, dtypes, band, softcap, sink } = self.case.clone();
        let longest = |of: &dyn Fn(&Part) -> usize| self.parts.iter().map(of).max().unwrap_or(1);
        let (rows, keys) = (longest(&|part| part.rows.len()), longest(&|part| part.rows.end));
        let room = keys + if matches!(self.store, Store::Strided) { 5 } else { 0 };
        let problem = Problem::new(self.parts.len(), HEADS * GROUP, rows, dim, dtypes);
        let problem = Problem { heads_kv: HEADS, ..problem }.with_seq_kv(room, Layout::Bshd);
        let mut problem = problem.with_lse(true).with_band(band);
        (problem.score.softcap, problem.score.sink) = (softcap, sink);
        let all = |of: &dyn Fn(&Part) -> usize| Some(self.parts.iter().map(of).sum());
        if self.queries == Queries::Packed {
            problem.lengths.q = SideLengths { packed: all(&|part| part.rows.len()), used: false };
        }
        match self.store {
            Store::Strided => problem.lengths.kv.used = true,
            Store::Packed => {
                problem.lengths.kv = SideLengths { packed: all(&|part| part.rows.end), used: false };
            }
            Store::Pages(page) => {
                problem.lengths.kv.used = true;
                let pages = self.parts.len() * keys.div_ceil(page);
                problem = problem.with_pages(page, pages + 1);
            }
        }
        problem
    }

    /// Where the tensor holds row `row` of part `part`: its batch entry and row.
    fn place(&self, problem: &Problem, tensor: Tensor, part: usize, row: usize) -> [usize; 2] {
        let is_packed =
            if tensor.is_of_keys() { problem.lengths.kv.packed } else { problem.lengths.q.packed };
        let before = self.parts[..part].iter();
        match (is_packed, problem.storage) {
            (Some(_), _) if tensor.is_of_keys() => [0, before.map(|part| part.rows.end).sum::<usize>() + row],
            (Some(_), _) => [0, before.map(|part| part.rows.len()).sum::<usize>() + row],
            (None, Storage::Pages(pages)) if tensor.is_of_keys() => {
                [self.page(problem, part, row / pages.rows), row % pages.rows]
            }
            _ => [part, row],
        }
    }

    /// Page `index` of part `part`: pages of all parts are in the opposite order of their numbers.
    fn page(&self, problem: &Problem, part: usize, index: usize) -> usize {
        let Some(pages) = problem.storage.pages() else { return 0 };
        pages.count - 1 - (part * pages.per_sequence + index)
    }

    pub fn inputs(&self, problem: &Problem) -> Inputs {
        let mut operands = OperandMap::default();
        for tensor in [Tensor::Q, Tensor::K, Tensor::V] {
            let [_, heads, _, dim] = problem.extents(tensor);
            let (elements, _) = problem.span(tensor).unwrap();
            // A kernel must not read elements that belong to no row of a sequence.
            let mut numbers = vec![f32::NAN; elements];
            for (index, part) in self.parts.iter().enumerate() {
                let first = if tensor.is_of_keys() { 0 } else { part.rows.start };
                for head in 0..heads {
                    with_rows(tensor, part.sequence, head, dim, part.rows.end, |rows| {
                        for row in first..part.rows.end {
                            let [entry, at] = self.place(problem, tensor, index, row - first);
                            let start = problem.strides(tensor).offset(entry, head, at) as usize;
                            numbers[start..start + dim].copy_from_slice(&rows[row * dim..][..dim]);
                        }
                    });
                }
            }
            operands.insert(tensor.into(), Values::round(problem.dtypes.of(tensor), &numbers));
        }
        let ends = |of: &dyn Fn(&Part) -> usize| {
            let lengths = self.parts.iter().map(|part| of(part) as i32);
            let sums = lengths.scan(0, |sum, length| Some((*sum += length, *sum).1));
            Values::I32([0].into_iter().chain(sums).collect())
        };
        let used = Values::I32(self.parts.iter().map(|part| part.rows.end as i32).collect());
        let arrays = [
            (LengthArray::CumulativeQ, ends(&|part| part.rows.len())),
            (LengthArray::CumulativeKv, ends(&|part| part.rows.end)),
            (LengthArray::UsedKv, used),
        ];
        let arrays = arrays.into_iter().filter(|(array, _)| array.len(problem).is_some());
        operands.extend(arrays.map(|(array, values)| (Operand::Lengths(array), values)));
        if let Some(pages) = problem.storage.pages() {
            let all = (0..self.parts.len()).flat_map(|part| (0..pages.per_sequence).map(move |i| (part, i)));
            let table = all.map(|(part, index)| self.page(problem, part, index) as i32);
            operands.insert(Operand::PageTable, Values::I32(table.collect()));
        }
        if problem.score.sink {
            let sinks = (0..problem.heads_q).map(|head| head as f32 / 4.0 - 0.5);
            operands.insert(Operand::Sinks, Values::F32(sinks.collect()));
        }
        Inputs { operands }
    }

    /// The rows of the results of a call, found in its outputs.
    pub fn results(&self, problem: &Problem, out: &[u8], lse: &[u32]) -> Results {
        let mut results = Results::new();
        let [_, heads, rows, dim] = problem.extents(Tensor::Out);
        let bytes = problem.dtypes.out.bytes();
        for (index, part) in self.parts.iter().enumerate() {
            for (number, row) in part.rows.clone().enumerate() {
                let [entry, at] = self.place(problem, Tensor::Out, index, number);
                for head in 0..heads {
                    let start = problem.strides(Tensor::Out).offset(entry, head, at) as usize;
                    let elements = out[start * bytes..(start + dim) * bytes].to_vec();
                    let lse = lse[(entry * heads + head) * rows + at];
                    results.insert((part.sequence, head, row), (elements, lse));
                }
            }
        }
        results
    }
}

/// Calls `take` with the numbers of the first `count` rows of a head, or of more. A thread draws a row once,
/// since thousands of calls have it.
fn with_rows(
    tensor: Tensor,
    sequence: u64,
    head: usize,
    dim: usize,
    count: usize,
    take: impl FnOnce(&[f32]),
) {
    thread_local!(static DRAWN: RefCell<HashMap<[u64; 4], Vec<f32>>> = RefCell::default());
    DRAWN.with_borrow_mut(|drawn| {
        let rows = drawn.entry([tensor as u64, sequence, head as u64, dim as u64]).or_default();
        for row in rows.len() / dim..count {
            rows.resize((row + 1) * dim, 0.0);
            draw(&mut rows[row * dim..], tensor, [sequence, head as u64, row as u64]);
        }
        take(rows);
    });
}

/// Draws a row: normal numbers, of which those of Q and K make logits of several powers of two.
fn draw(to: &mut [f32], tensor: Tensor, place: [u64; 3]) {
    let seed = place.into_iter().fold(tensor as u64 + 1, |seed, n| seed.wrapping_mul(1_000_003) ^ n);
    let mut rng = SmallRng::seed_from_u64(seed);
    let size = if tensor == Tensor::V { 1.0 } else { 2.5 };
    for element in to {
        let sum: f32 = (0..4).map(|_| rng.random::<f32>()).sum();
        *element = size * (sum - 2.0) * 3f32.sqrt();
    }
}
