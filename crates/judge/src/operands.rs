//! Values of a problem's operands other than Q, K and V.

use half::{bf16, f16};
use kernels::{LengthArray, Operand};
use problem::{
    LengthValues, Operands, Problem, ScaleValues, Sequence, SideLengths, TableData, TableType, Tensor,
};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

/// The elements of a table.
#[derive(Clone, Debug, PartialEq)]
pub enum TableValues {
    F32(Vec<f32>),
    F16(Vec<f16>),
    Bf16(Vec<bf16>),
    I32(Vec<i32>),
    U8(Vec<u8>),
}

impl TableValues {
    fn data(&self) -> TableData<'_> {
        match self {
            TableValues::F32(x) => TableData::F32(x),
            TableValues::F16(x) => TableData::F16(x),
            TableValues::Bf16(x) => TableData::Bf16(x),
            TableValues::I32(x) => TableData::I32(x),
            TableValues::U8(x) => TableData::U8(x),
        }
    }

    fn to_bytes(&self) -> Vec<u8> {
        match self {
            TableValues::F32(x) => x.iter().flat_map(|x| x.to_le_bytes()).collect(),
            TableValues::F16(x) => x.iter().flat_map(|x| x.to_le_bytes()).collect(),
            TableValues::Bf16(x) => x.iter().flat_map(|x| x.to_le_bytes()).collect(),
            TableValues::I32(x) => x.iter().flat_map(|x| x.to_le_bytes()).collect(),
            TableValues::U8(x) => x.clone(),
        }
    }
}

/// Values of a problem's operands other than Q, K and V. An operand that the problem does not have is empty.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OtherInputs {
    pub cumulative_q: Vec<i32>,
    pub cumulative_kv: Vec<i32>,
    pub used_q: Vec<i32>,
    pub used_kv: Vec<i32>,
    pub left_pad: Vec<i32>,
    /// A logit per query head.
    pub sinks: Vec<f32>,
    pub tables: Vec<TableValues>,
    /// Descale factors of Q, K and V.
    pub scales: [Vec<f32>; 3],
}

impl OtherInputs {
    /// Random values. Lengths are uneven: a length of no rows is followed by the maximum length and, if the
    /// batch has room, by a length of one row.
    pub fn draw(problem: &Problem, seed: u64) -> OtherInputs {
        let mut rng = SmallRng::seed_from_u64(seed ^ 0x6c65_6e67_7468_7321);
        let rng = &mut rng;
        let (q, kv) = (problem.lengths.q, problem.lengths.kv);
        let cumulative_q = cumulative(problem.batch, q, problem.seq_q, rng);
        let cumulative_kv = cumulative(problem.batch, kv, problem.seq_kv, rng);
        let lengths = |some: bool, seq: usize, rng: &mut SmallRng| {
            let count = if some { problem.batch } else { 0 };
            let mut drawn: Vec<i32> = (0..count).map(|_| rng.random_range(0..=seq as i32)).collect();
            set_extremes(&mut drawn, seq as i32, rng);
            drawn
        };
        let used_q = lengths(q.used, problem.seq_q, rng);
        let used_kv = lengths(kv.used, problem.seq_kv, rng);
        let left_pad = lengths(problem.lengths.left_padded, problem.seq_kv / 3, rng);
        let heads = if problem.score.sink { problem.heads_q } else { 0 };
        let sinks = (0..heads).map(|_| rng.random_range(-3.0..3.0)).collect();
        let tables = problem.programs.tables.iter().map(|table| {
            let elements = table.span();
            let mut float = || rng.random_range(-2.0f32..2.0);
            match table.dtype {
                TableType::F32 => TableValues::F32((0..elements).map(|_| float()).collect()),
                TableType::F16 => TableValues::F16((0..elements).map(|_| f16::from_f32(float())).collect()),
                TableType::Bf16 => {
                    TableValues::Bf16((0..elements).map(|_| bf16::from_f32(float())).collect())
                }
                TableType::I32 => TableValues::I32((0..elements).map(|_| rng.random_range(0..4)).collect()),
                TableType::U8 => TableValues::U8((0..elements).map(|_| rng.random_range(0..2)).collect()),
            }
        });
        let tables = tables.collect();
        let scales = [Tensor::Q, Tensor::K, Tensor::V].map(|tensor| {
            let low = if tensor == Tensor::V { -2.0 } else { 0.3 };
            (0..problem.scale_len(tensor)).map(|_| rng.random_range(low..2.0)).collect()
        });
        OtherInputs { cumulative_q, cumulative_kv, used_q, used_kv, left_pad, sinks, tables, scales }
    }

    /// Makes a factor of Q and one of K 0, negative, infinite or NaN. If a tensor has only one factor, it
    /// becomes 0, so that some outputs stay finite.
    pub fn spoil_factors(&mut self, seed: u64) {
        const BAD: [f32; 4] = [f32::NAN, -1.0, f32::INFINITY, 0.0];
        for (i, factors) in self.scales[..2].iter_mut().enumerate() {
            let (len, turn) = (factors.len(), (seed as usize).wrapping_add(i));
            if len > 0 {
                factors[turn % len] = if len == 1 { 0.0 } else { BAD[turn % 4] };
            }
        }
    }

    /// Calls `run` with the operands.
    pub fn with<R>(&self, run: impl FnOnce(&Operands<'_>) -> R) -> R {
        let tables: Vec<TableData<'_>> = self.tables.iter().map(TableValues::data).collect();
        let [q, k, v] = self.scales.each_ref().map(Vec::as_slice);
        let scales = ScaleValues { q, k, v };
        run(&Operands { lengths: self.lengths(), scales, sinks: &self.sinks, tables: &tables })
    }

    /// The rows of each batch entry. Empty if the arrays do not fit the problem.
    pub fn sequences(&self, problem: &Problem) -> Vec<Sequence> {
        problem.sequences(&self.lengths()).unwrap_or_default()
    }

    fn lengths(&self) -> LengthValues<'_> {
        LengthValues {
            cumulative_q: &self.cumulative_q,
            cumulative_kv: &self.cumulative_kv,
            used_q: &self.used_q,
            used_kv: &self.used_kv,
            left_pad: &self.left_pad,
        }
    }

    /// The contents of an operand's buffer; `None` for operands that are not such inputs.
    pub fn bytes(&self, operand: Operand) -> Option<Vec<u8>> {
        let ints = |x: &[i32]| Some(x.iter().flat_map(|x| x.to_le_bytes()).collect());
        let floats = |x: &[f32]| Some(x.iter().flat_map(|x| x.to_le_bytes()).collect());
        match operand {
            Operand::Lengths(LengthArray::CumulativeQ) => ints(&self.cumulative_q),
            Operand::Lengths(LengthArray::CumulativeKv) => ints(&self.cumulative_kv),
            Operand::Lengths(LengthArray::UsedQ) => ints(&self.used_q),
            Operand::Lengths(LengthArray::UsedKv) => ints(&self.used_kv),
            Operand::Lengths(LengthArray::LeftPad) => ints(&self.left_pad),
            Operand::Sinks => floats(&self.sinks),
            Operand::Descale(Tensor::Q) => floats(&self.scales[0]),
            Operand::Descale(Tensor::K) => floats(&self.scales[1]),
            Operand::Descale(Tensor::V) => floats(&self.scales[2]),
            Operand::Table(i) => self.tables.get(i as usize).map(TableValues::to_bytes),
            _ => None,
        }
    }
}

/// Cumulative lengths of sequences of at most `seq` rows in a packed tensor; empty if it is not packed. Rows
/// at the end may belong to no sequence.
fn cumulative(batch: usize, side: SideLengths, seq: usize, rng: &mut SmallRng) -> Vec<i32> {
    let Some(rows) = side.packed else { return Vec::new() };
    let mut lengths: Vec<i32> = (0..batch).map(|_| rng.random_range(0..=seq as i32)).collect();
    set_extremes(&mut lengths, seq as i32, rng);
    let mut ends = vec![0];
    for length in lengths {
        let end = ends[ends.len() - 1] + length;
        ends.push(end.min(rows as i32));
    }
    ends
}

fn set_extremes(lengths: &mut [i32], longest: i32, rng: &mut SmallRng) {
    if let [_, _, ..] = lengths {
        let at = rng.random_range(0..lengths.len() - 1);
        lengths[at] = 0;
        lengths[at + 1] = longest;
        let after = (at + 2) % lengths.len();
        if after != at {
            lengths[after] = longest.min(1);
        }
    }
}
