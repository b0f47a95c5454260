//! Random problems with lengths, sinks and programs.

use std::collections::HashSet;

use flashcore_cpu::Element;
use half::{bf16, f16};
use problem::program::library as lib;
use problem::{
    Band, DType, ElementType, Expr, KeyPlaces, Layout, LengthArray, Operand, OperandMap, Problem, Program,
    Score, Table, Tensor,
};
use rand::{Rng, SeedableRng, rngs::SmallRng};

use crate::common::Inputs;
use crate::data::{Data, slices};

/// Number of score programs and of mask programs; 0 means none.
pub const SCORES: usize = 10;
pub const MASKS: usize = 11;
/// Number of values of each feature: score, mask, lengths, band, sink, cap, group, type, pages, dropout, bad
/// elements.
pub const COUNTS: [usize; 11] = [SCORES, MASKS, 6, 4, 2, 2, 3, 3, 4, 2, 2];

/// A problem with its operands.
pub struct Case {
    pub problem: Problem,
    /// The inputs beside Q, K and V.
    pub others: OperandMap<Data>,
    pub seed: u64,
    /// The value of each feature: the number of the feature and the value.
    pub features: Vec<(usize, usize)>,
}

impl Case {
    /// Even lengths, enough rows for every arithmetic, and one score or mask program.
    pub fn plain(dtype: DType, score: usize, mask: usize) -> Case {
        let problem = Problem::new(1, 2, 70, 32, dtype).with_seq_kv(75, Layout::Bhsd);
        let mut case = Case { problem, others: OperandMap::default(), seed: 1, features: Vec::new() };
        case.add_programs(score, mask, &mut SmallRng::seed_from_u64(1));
        case
    }

    pub fn draw(seed: u64, score: usize, mask: usize) -> Case {
        let mut rng = SmallRng::seed_from_u64(seed);
        let rng = &mut rng;
        let mut values: Vec<usize> = COUNTS.iter().map(|&count| rng.random_range(0..count)).collect();
        (values[0], values[1]) = (score, mask);
        let [_, _, lengths, band, sink, cap, group, dtype, pages, dropout, _] = values[..] else {
            unreachable!()
        };
        let (heads_kv, group) = (rng.random_range(1..3), [1, 5, 8][group]);
        let (rows, keys) = (rng.random_range(1..75), rng.random_range(1..130));
        let mut p = Problem::new(2, heads_kv * group, rows, rng.random_range(1..40), DType::OUTPUTS[dtype]);
        (p.heads_kv, p.seq_kv, p.head_dim_v) = (heads_kv, keys, rng.random_range(1..40));
        p = p.with_layout(Layout::Bshd);
        p.band = [Band::FULL, Band::CAUSAL, Band::CAUSAL_TOP_LEFT, Band::window(30, 4)][band];
        p.score.softcap = [None, Some(3.0)][cap];
        p.score = p.score.with_operands(|_| sink == 1);
        if rng.random_bool(0.2) {
            p.score.scale = Some(-0.3);
        }
        let features = values.into_iter().enumerate().collect();
        let mut case = Case { problem: p, others: OperandMap::default(), seed, features };
        case.add_lengths(lengths, rng);
        if pages > 0 {
            case.add_pages([1, 5, 16][pages - 1], rng);
        }
        if sink == 1 {
            for operand in Score::OPERANDS {
                let least = if operand.is_factor() { 0.1 } else { -3.0 };
                let values: Vec<f32> = (0..heads_kv * group).map(|_| rng.random_range(least..3.0)).collect();
                case.others.insert(operand, values.into());
            }
        }
        if dropout == 1 {
            case.problem.dropout = Some(rng.random_range(0.0..0.9));
            let state: Vec<i32> = (0..4).map(|_| rng.random()).collect();
            case.others.insert(Operand::RngState, state.into());
        }
        case.add_programs(score, mask, rng);
        case
    }

    fn add_lengths(&mut self, lengths: usize, rng: &mut SmallRng) {
        let p = &mut self.problem;
        p.batch = 3;
        let mut add = |array, lengths: Vec<i32>| self.others.insert(Operand::Lengths(array), lengths.into());
        let (rows, keys) = (p.seq_q as i32, p.seq_kv as i32);
        // A sequence without rows, a full one, and one in between.
        let mut three = |most: i32| {
            let mut three = vec![0, most, rng.random_range(0..=most)];
            let turn = rng.random_range(0..3);
            three.rotate_left(turn);
            three
        };
        let sums = |lengths: &[i32]| {
            vec![1, 1 + lengths[0], 1 + lengths[0] + lengths[1], 1 + lengths.iter().sum::<i32>()]
        };
        let packs = |sums: &[i32]| Some(sums[3] as usize + 2);
        if matches!(lengths, 1 | 2) {
            let cumulative = sums(&three(rows));
            p.lengths.q.packed = packs(&cumulative);
            add(LengthArray::CumulativeQ, cumulative);
        }
        if matches!(lengths, 1 | 3) {
            let cumulative = sums(&three(keys));
            p.lengths.kv.packed = packs(&cumulative);
            add(LengthArray::CumulativeKv, cumulative);
        }
        if matches!(lengths, 2 | 4) {
            add(LengthArray::UsedKv, three(keys));
            p.lengths.kv.used = true;
        }
        if matches!(lengths, 3 | 4) {
            add(LengthArray::UsedQ, three(rows));
            p.lengths.q.used = true;
        }
        if lengths == 5 {
            add(LengthArray::LeftPad, three(keys / 2));
            p.lengths.left_padded = true;
        }
        let of = |tensor| {
            let [_, heads, rows, dim] = p.extents(tensor);
            Layout::Bshd.strides(heads, rows, dim)
        };
        (p.q, p.k, p.v, p.out) = (of(Tensor::Q), of(Tensor::K), of(Tensor::V), of(Tensor::Out));
    }

    /// Stores K and V in pages of `rows` rows, unless they are packed. Entries of the page table that no
    /// sequence needs are no pages.
    fn add_pages(&mut self, rows: usize, rng: &mut SmallRng) {
        let p = &mut self.problem;
        if p.lengths.kv.packed.is_some() {
            return;
        }
        let per_sequence = p.seq_kv.div_ceil(rows);
        let count = p.batch * per_sequence + 3;
        *p = p.clone().with_pages(rows, count);
        if rng.random_bool(0.5) {
            let strides = |dim| Layout::Bhsd.strides(p.heads_kv, rows, dim);
            (p.k, p.v) = (strides(p.head_dim), strides(p.head_dim_v));
        }
        let mut free: Vec<i32> = (0..count as i32).collect();
        let mut table = vec![i32::MIN; p.batch * per_sequence];
        for s in p.sequences(&slices(&self.others)).unwrap() {
            let needed = s.kv.start / rows..(s.kv.start + s.kv.len).div_ceil(rows);
            for index in needed.filter(|_| s.kv.len > 0) {
                let page = free.swap_remove(rng.random_range(0..free.len()));
                table[s.kv.batch * per_sequence + index] = page;
            }
        }
        self.others.insert(Operand::PageTable, table.into());
    }

    fn add_programs(&mut self, score: usize, mask: usize, rng: &mut SmallRng) {
        let (rows, keys) = (self.problem.seq_q, self.problem.seq_kv);
        let (batch, heads) = (self.problem.batch, self.problem.heads_q);
        let full = [batch, heads, rows, keys];
        let (b, h, q, k) = (lib::batch(), lib::head(), lib::query(), lib::key());
        self.problem.programs.ints = vec![7, 50];
        self.problem.programs.floats = vec![1.5];
        let score = match score {
            0 => None,
            1 => Some(lib::alibi(self.table(ElementType::F32, &[batch, heads], &[0, 1], rng))),
            2 => Some(lib::bias(self.dense(ElementType::Bf16, &full, rng))),
            3 => {
                // One bias for all heads, in rows with gaps.
                let strides = [(rows * (keys + 3)) as i64, 0, keys as i64 + 3, 1];
                Some(lib::bias(self.table(ElementType::F16, &full, &strides, rng)))
            }
            4 => {
                // Rows and keys transposed, and every other element.
                let strides = [0, (2 * rows * keys) as i64, 2, 2 * rows as i64];
                Some(lib::bias(self.table(ElementType::F32, &full, &strides, rng)))
            }
            5 => Some(lib::relative_bias(self.dense(ElementType::F32, &[heads, 60], rng), 30)),
            6 => Some(lib::t5_bias(self.dense(ElementType::F32, &[heads, 32], rng), 32, 128, true)),
            7 => {
                let of_key = self.dense(ElementType::F16, &[batch, keys], rng);
                Some(
                    (lib::score() * 0.7).tanh() * lib::float(0)
                        + Expr::load(of_key, true, [b.clone(), k.clone()]).exp2()
                        - (q.clone() % 3 * h.clone()).unary(problem::program::UnaryOp::ToFloat) * 0.1,
                )
            }
            8 => Some(q.clone().eq(k.clone()).select(lib::score() * 2.0, lib::score().abs().min(1.0))),
            _ => {
                // Every comparison of the two positions, with another weight for each.
                let orders = [
                    q.clone().lt(k.clone()),
                    k.clone().le(q.clone()),
                    q.clone().ge(k.clone()),
                    k.clone().gt(q.clone()),
                    k.clone().eq(q.clone()),
                    q.clone().ne(k.clone()),
                ];
                let weighted = orders.into_iter().zip([0.1, 0.2, 0.4, 0.8, 1.6, 3.2]);
                Some(weighted.fold(lib::score(), |sum, (order, weight)| sum + order.select(weight, 0.0)))
            }
        };
        let mask = match mask {
            0 => None,
            1 => Some(lib::document(self.dense(ElementType::I32, &[batch, rows.max(keys)], rng))),
            2 => Some(lib::mask_tensor(self.dense(ElementType::U8, &full, rng))),
            3 => {
                let strides = [keys as i64, 0, 0, 1];
                Some(lib::mask_tensor(self.table(ElementType::U8, &full, &strides, rng)))
            }
            4 => Some(lib::chunk(lib::int(0))),
            5 => Some(lib::prefix(lib::int(0))),
            6 => Some(lib::dilated(3)),
            7 => Some(lib::tree(self.dense(ElementType::I32, &[rows], rng))),
            8 => Some(lib::window(lib::int(1), 3) & k.clone().ne(5)),
            9 => Some(!((h + q.clone() + b) % 4).eq(0) & (q | (k.clone() >> 4)).gt(3)),
            _ => Some(Expr::from(false) | lib::block_diagonal(40)),
        };
        self.problem.programs.score = score.map(|expr| Program::new(&expr).unwrap());
        self.problem.programs.mask = mask.map(|expr| Program::new(&expr).unwrap());
        self.problem.check().unwrap();
    }

    fn dense(&mut self, dtype: ElementType, extents: &[usize], rng: &mut SmallRng) -> u32 {
        let strides = Table::dense(dtype, extents).strides;
        self.table(dtype, extents, &strides, rng)
    }

    /// Adds a table with random contents. Returns its number.
    fn table(&mut self, dtype: ElementType, extents: &[usize], strides: &[i64], rng: &mut SmallRng) -> u32 {
        let table = Table { dtype, extents: extents.to_vec(), strides: strides.to_vec() };
        let elements = 0..table.span();
        let mut float = || rng.random_range(-2.0f32..2.0);
        let data: Data = match dtype {
            ElementType::F32 => elements.map(|_| float()).collect::<Vec<_>>().into(),
            ElementType::F16 => elements.map(|_| f16::from_f32(float())).collect::<Vec<_>>().into(),
            ElementType::Bf16 => elements.map(|_| bf16::from_f32(float())).collect::<Vec<_>>().into(),
            // Documents of neighbouring positions are often equal.
            ElementType::I32 => {
                elements.map(|i| (i as i32 / 25) + rng.random_range(0..2)).collect::<Vec<_>>().into()
            }
            ElementType::U8 => {
                elements.map(|i| ((i / 50) % 3) as u8 * rng.random_range(0..2)).collect::<Vec<_>>().into()
            }
            ElementType::E4m3 | ElementType::E5m2 => unreachable!("{dtype} is no type of tables"),
        };
        let number = self.problem.programs.tables.len() as u8;
        self.others.insert(Operand::Table(number), data);
        self.problem.programs.tables.push(table);
        number.into()
    }

    /// Makes elements of K and V NaN or infinite: all of those that belong to no key, and one key's in some
    /// cases.
    pub fn spoil<T: Element>(&self, inputs: &mut Inputs<T>) {
        let p = &self.problem;
        let others = slices(&self.others);
        let places = KeyPlaces::of(p, &others);
        let of_sequence = |s: problem::Sequence| {
            let rows = s.kv.start..s.kv.start + s.kv.len;
            rows.map(move |row| places.place(s.kv.batch, row))
        };
        let keys: HashSet<_> = p.sequences(&others).unwrap().into_iter().flat_map(of_sequence).collect();
        for (tensor, elements) in [(Tensor::K, &mut inputs.k), (Tensor::V, &mut inputs.v)] {
            let [batches, heads, rows, dim] = p.extents(tensor);
            for (batch, row) in (0..batches).flat_map(|b| (0..rows).map(move |row| (b, row))) {
                let is_key = keys.contains(&(batch, row));
                let is_bad = self.features.last().is_some_and(|&(_, bad)| bad == 1) && row % 37 == 11;
                for head in (0..heads).filter(|_| !is_key || is_bad) {
                    let start = p.strides(tensor).offset(batch, head, row) as usize;
                    let count = if is_key { 1 } else { dim };
                    elements[start..start + count].fill(T::from_f32(f32::NAN));
                }
            }
        }
    }
}
