//! The kernel before the main kernel: the numbers of query rows, and sums of zero.

use attend::KeyBand;
use problem::{Operand, Problem, Tensor};
use ptx::{Access, Builder, CmpOp, F32, Global, Pointer, R32, SpecialReg};
use std::f32::consts::LOG2_E;
use tile::divide;

use super::order::AddOrder;
use super::params::{OwnTile, RowTiles, Strided, declare_row_lengths, launch};
use super::plan::{FusedPlan, THREADS, TileSizes};
use crate::backward::sums::SinkParts;
use crate::contract::Contract;
use crate::draft::Draft;
use crate::forward::contract::{declare_band, half};
use crate::{Arch, Baked};

const ENTRY: &str = "flash_backward_rows";

impl FusedPlan {
    /// The kernel that computes −L·log2 e and −D of each row.
    pub(super) fn draft_rows<'a>(&'a self, problem: &Problem, baked: &'a Baked, arch: &Arch) -> Draft<'a> {
        let mut k = Builder::kernel(ENTRY);
        k.max_threads(THREADS);
        let mut c = Contract::new(problem);
        let [out, d_out] =
            [Tensor::Out, Tensor::DOut].map(|tensor| Strided::declare(&mut k, &mut c, problem, tensor));
        let lse = c.operand(&mut k, Operand::Lse).expect("the backward pass reads the LSE");
        let d_lse = c.operand(&mut k, Operand::DLse);
        let tiles = RowTiles::declare(&mut k, &mut c, (problem, baked), [Access::Write, Access::Write]);
        let seq_q = c.u32(&mut k, "seq_q", problem.seq_q as u32);
        let lengths = declare_row_lengths(&mut k, &mut c, problem, seq_q);
        let additions = AddOrder::declare(&mut k, &mut c, problem, Access::Write);
        let additions = additions.map(|order| Additions {
            order,
            band: declare_band(&mut k, &mut c, problem),
            seq_kv: match lengths {
                None => c.u32(&mut k, "seq_kv", problem.seq_kv as u32),
                Some(lengths) => lengths.kv.longest,
            },
        });
        let sinks = SinkParts::declare(&mut k, &mut c, problem, self.sink_counts(problem));
        let grid = self.row_grid(problem);
        let launch = launch(THREADS, grid, baked.flat, 0);
        let grid = grid.declare(&mut k, &mut c, baked.flat);
        let order = self.tile_order;
        let body = move |k: &mut Builder| {
            k.griddep_launch_dependents();
            let own = OwnTile::new(k, (order, grid), (lengths, seq_q), TileSizes::new(baked));
            let rows = Rows { baked, out, d_out, lse, d_lse, tiles, sinks, own };
            rows.store(k);
            if let Some(Additions { order, band, seq_kv }) = additions {
                let lengths = [rows.own.len(), rows.own.keys(seq_kv)];
                let thread = k.special(SpecialReg::TidX);
                order.begin(k, (baked, &band), (&tiles, &own, lengths), thread);
            }
        };
        Draft::new(k, c, (ENTRY, launch), arch.full_target(), body)
    }
}

/// The order of additions, and the keys that rows see.
struct Additions {
    order: AddOrder,
    band: KeyBand,
    seq_kv: R32,
}

/// The kernel being emitted.
struct Rows<'a> {
    baked: &'a Baked,
    out: Strided,
    d_out: Strided,
    lse: Global,
    d_lse: Option<Global>,
    tiles: RowTiles,
    sinks: Option<SinkParts>,
    own: OwnTile,
}

impl Rows<'_> {
    fn clear_sums(&self, k: &mut Builder) {
        let thread = k.special(SpecialReg::TidX);
        let sums = self.tiles.sums(k, self.own.place);
        let own = k.index(sums, thread, 16);
        let zero: F32 = k.mov(0.0);
        for first in (0..TileSizes::new(self.baked).sum_bytes()).step_by((THREADS * 16) as usize) {
            k.st_vec(own.at(first.into()), [zero; 4]);
        }
    }

    /// Stores the numbers of the rows, and sums of zero while O and dO are on their way. As many neighbouring
    /// threads as a row has chunks of 16 bytes compute a row.
    fn store(&self, k: &mut Builder) {
        let sizes = TileSizes::new(self.baked);
        let chunks = (sizes.columns / 8).next_power_of_two();
        let [_, head, tile] = self.own.at;
        let thread = k.special(SpecialReg::TidX);
        let row = divide(k, thread, chunks);
        let chunk = k.and(thread, chunks - 1);
        let is_first = k.setp_u(CmpOp::Eq, chunk, 0);
        let numbers = self.tiles.numbers(k, self.own.place);
        let numbers = k.index(numbers, row, 4);
        let position = k.mad(tile, sizes.rows, row);
        let loaded: Vec<_> = (0..sizes.rows)
            .step_by((THREADS / chunks) as usize)
            .map(|first| {
                let position = k.add(position, first);
                let at = self.own.row(k, position);
                (first, position, at, self.load(k, (position, at), (chunk, chunks)))
            })
            .collect();
        self.clear_sums(k);
        let mut numbers_of_rows = [Vec::new(), Vec::new()];
        for (first, position, at, out_and_d_out) in loaded {
            let exists = k.setp_u(CmpOp::Lt, position, self.own.len());
            let delta = self.delta(k, out_and_d_out, chunks);
            let mut number = |array: Global, missing: f32| {
                let from = self.own.number(k, self.baked, array, at);
                let number: F32 = k.mov(missing);
                k.guarded(exists, |k| k.ld_to(number, from));
                number
            };
            let log_sum = number(self.lse, f32::NEG_INFINITY);
            let d_lse = self.d_lse.map(|d_lse| number(d_lse, 0.0));
            let minus_delta = match d_lse {
                None => k.neg(delta),
                // The LSE's gradient reaches each score through P, as −D does.
                Some(d_lse) => k.sub(d_lse, delta),
            };
            let minus = k.mul(log_sum, -LOG2_E);
            // A row that sees no key, or that does not exist, has probabilities of 0.
            let is_dead = k.setp_f(CmpOp::Eq, log_sum, f32::NEG_INFINITY);
            let minus_log_sum = k.selp(f32::NEG_INFINITY, minus, is_dead);
            let to = numbers.at(i64::from(4 * first));
            k.guarded(is_first, |k| k.st(to, minus_log_sum));
            k.guarded(is_first, |k| k.st(to.at(i64::from(4 * sizes.rows)), minus_delta));
            numbers_of_rows[0].push(minus_log_sum);
            numbers_of_rows[1].push(minus_delta);
        }
        if let Some(sinks) = &self.sinks {
            let part = sinks.part(k, head, numbers_of_rows.each_ref().map(Vec::as_slice));
            let (warp, lane) = (k.shr_u(thread, 5), k.and(thread, 31));
            // The threads of a row have the same numbers.
            let bits: Vec<u32> = [8, 16].into_iter().filter(|&bit| bit >= chunks).collect();
            sinks.store(k, self.own.place, [warp, lane], (part, &bits));
        }
    }

    /// The thread's chunk of O and of dO of a row, zeros beyond the rows.
    fn load(
        &self,
        k: &mut Builder,
        (position, at): (R32, [R32; 3]),
        (chunk, chunks): (R32, u32),
    ) -> [[R32; 4]; 2] {
        let exists = k.setp_u(CmpOp::Lt, position, self.own.len());
        let exists = match self.baked.head_dim_v() / 8 {
            all if all == chunks => exists,
            width => k.setp_u_and(CmpOp::Lt, chunk, width, exists),
        };
        [self.out, self.d_out].map(|tensor| {
            let row = tensor.row(k, self.baked, at);
            let from = k.index(row, chunk, 16);
            let words: [R32; 4] = std::array::from_fn(|_| k.mov(0));
            k.guarded(exists, |k| k.ld_vec_to(words, from));
            words
        })
    }

    /// D = rowsum(dO ∘ O) of a row whose chunks neighbouring threads have.
    fn delta(&self, k: &mut Builder, [out, d_out]: [[R32; 4]; 2], chunks: u32) -> F32 {
        let mut sum: F32 = k.mov(0.0);
        for (out, d_out) in out.into_iter().zip(d_out) {
            let [out, d_out] = [out, d_out].map(|word| k.unpack(half(self.baked), word));
            for (out, d_out) in out.into_iter().zip(d_out) {
                sum = k.mad(out, d_out, sum);
            }
        }
        let mut mask = 1;
        while mask < chunks {
            let other = k.shfl_xor(sum, mask);
            sum = k.add(sum, other);
            mask *= 2;
        }
        sum
    }
}
