//! Split-KV: several CTAs divide the keys of a row block ([`MmaPlan::splits`]). The first kernel stores
//! partial results, and the second kernel merges them.

use attend::{Partials, Sinks, SplitRow, accepted_value_factor};
use problem::{Operand, Problem, Tensor};
use ptx::{Access, Builder, CmpOp, Dim3, F32, Global, Launch, Pointer, R32, R64, SpecialReg};
use tile::divide;

use super::plan::MmaPlan;
use crate::contract::Contract;
use crate::draft::Draft;
use crate::forward::contract::{declare_head_strides, lse_of_row, out_half, row_of_output};
use crate::forward::descale::ValueDescale;
use crate::grid::{Axis, Extents, Grid};
use crate::{Arch, Baked};

const ENTRY: &str = "flash_forward_merge";
/// Threads of a CTA of the merge.
const THREADS: u32 = 128;
/// Columns of O that a thread of the merge computes.
const COLUMNS: u32 = 4;

impl MmaPlan {
    /// Threads of the merge for a head.
    pub(super) const fn merging_threads(problem: &Problem) -> u64 {
        problem.seq_q as u64 * (problem.head_dim_v as u64).div_ceil(COLUMNS as u64)
    }

    /// The extents of the merge's grid.
    pub(super) fn merge_grid(problem: &Problem) -> Extents {
        let ctas = MmaPlan::merging_threads(problem).div_ceil(THREADS.into());
        Extents([ctas, problem.heads_q as u64, problem.batch as u64])
    }

    /// The kernel that merges the splits; the plan has been checked.
    pub(super) fn merge<'a>(&'a self, problem: &Problem, baked: &'a Baked, arch: &Arch) -> Draft<'a> {
        let mut k = Builder::kernel(ENTRY);
        k.max_threads(THREADS);
        let mut contract = Contract::new(problem);
        let params = Params::declare(&mut k, &mut contract, (problem, baked), self);
        let threads = MmaPlan::merging_threads(problem);
        let launch = Launch::new(
            MmaPlan::merge_grid(problem).launch(baked.flat),
            Dim3((threads as u32).next_multiple_of(32).min(THREADS), 1, 1),
        );
        let body = move |k: &mut Builder| self.merge_body(k, &params, baked);
        Draft::new(k, contract, (ENTRY, launch), arch.target(), body)
    }

    /// Each thread computes [`COLUMNS`] columns of a row.
    fn merge_body(&self, k: &mut Builder, params: &Params, baked: &Baked) {
        let &Params { grid, partials, out, lse, sinks, descale, strides, seq_q } = params;
        let [cta, head, batch] = [Axis::X, Axis::Y, Axis::Z].map(|axis| grid.index(k, axis));
        let thread = k.special(SpecialReg::TidX);
        let index = k.mad(cta, THREADS, thread);
        let chunks = baked.head_dim_v().div_ceil(COLUMNS);
        let row = divide(k, index, chunks);
        let before = k.mul(row, chunks);
        let chunk = k.sub(index, before);
        let column = k.mul(chunk, COLUMNS);
        let beyond = k.setp_u(CmpOp::Ge, row, seq_q);
        k.exit_if(beyond);

        let split: R32 = k.mov(0);
        let first = partial_row(k, baked, self.splits, [batch, head, split, row], seq_q);
        let sink = sinks.map(|start| Sinks::of_head(k, start, head));
        let factor = descale.map(|descale| {
            let key_head = divide(k, head, baked.group_size());
            let factor = descale.load(k, [batch, key_head]);
            accepted_value_factor(k, factor)
        });
        let parts = SplitRow { first, step: seq_q, splits: self.splits };
        let (o, log_sum) = partials.merge(k, parts, column, sink, factor);
        let to = row_of_output(k, baked, (out, strides), [batch, head, row]);
        let to = k.index(to, column, baked.dims.dtypes.out.bytes() as u32);
        self.store_columns(k, baked, to, column, o);
        if let Some(lse) = lse {
            let to = lse_of_row(k, baked, (lse, seq_q), [batch, head, row]);
            let first = k.setp_u(CmpOp::Eq, column, 0);
            k.guarded(first, |k| k.st(to, log_sum));
        }
    }

    /// Rounds the four columns from `column` on and stores those that exist, in 8-byte stores if rows are
    /// aligned to 8 bytes.
    fn store_columns(&self, k: &mut Builder, baked: &Baked, to: Global, column: R32, [a, b, c, d]: [F32; 4]) {
        let cut = baked.head_dim_v() % COLUMNS;
        let store = |k: &mut Builder, number: u32, store: &dyn Fn(&mut Builder)| {
            if cut == 0 || number < cut {
                return store(k);
            }
            let columns = baked.head_dim_v().saturating_sub(number);
            let exists = k.setp_u(CmpOp::Lt, column, columns);
            k.guarded(exists, store);
        };
        let Some(half) = out_half(baked) else {
            for (number, value) in (0..).zip([a, b, c, d]) {
                store(k, number, &|k| k.st(to.at(4 * i64::from(number)), value));
            }
            return;
        };
        let pairs = [k.pack(half, a, b), k.pack(half, c, d)];
        if self.copy.bytes() >= 8 && cut == 0 {
            return k.st_vec(to, pairs);
        }
        for (place, pair) in (0..).zip(pairs) {
            for (element, value) in (0..).zip(k.split16(pair)) {
                let number = 2 * place + element;
                store(k, number, &|k| k.st(to.at(2 * i64::from(number)), value));
            }
        }
    }
}

/// The parameters of the merge.
struct Params {
    grid: Grid,
    partials: Partials,
    out: Global,
    lse: Option<Global>,
    sinks: Option<Global>,
    descale: Option<ValueDescale>,
    strides: [R64; 2],
    seq_q: R32,
}

impl Params {
    fn declare(
        k: &mut Builder,
        c: &mut Contract<'_>,
        (problem, baked): (&Problem, &Baked),
        plan: &MmaPlan,
    ) -> Params {
        Params {
            grid: MmaPlan::merge_grid(problem).declare(k, c, baked.flat),
            partials: declare(k, c, problem, plan, Access::Read),
            out: c.tensor(k, Tensor::Out),
            lse: c.operand(k, Operand::Lse),
            sinks: c.operand(k, Operand::Sinks),
            descale: merge_descales(problem).then(|| ValueDescale::declare(k, c, problem)).flatten(),
            strides: declare_head_strides(k, c, problem, Tensor::Out),
            seq_q: c.u32(k, "seq_q", problem.seq_q as u32),
        }
    }
}

/// Whether the merge multiplies by the factor of V. Factors per block of rows are in the partial results.
pub(super) fn merge_descales(problem: &Problem) -> bool {
    problem.scales.rows(Tensor::V).is_none()
}

/// Declares the temporaries of the partial results.
pub(super) fn declare(
    k: &mut Builder,
    c: &mut Contract<'_>,
    problem: &Problem,
    plan: &MmaPlan,
    access: Access,
) -> Partials {
    let rows = plan.splits as usize * problem.batch * problem.heads_q * problem.seq_q;
    let [_, columns] = plan.columns(problem);
    let out_bytes = Partials::out_bytes(rows, columns as usize);
    Partials {
        out: c.temporary(k, "partial_out", out_bytes, access),
        statistics: c.temporary(k, "partial_statistics", Partials::statistics_bytes(rows), access),
        columns,
    }
}

/// The index of a row of a split among the partial results: `[batch][head][split][row]`.
pub(super) fn partial_row(
    k: &mut Builder,
    baked: &Baked,
    splits: u32,
    [batch, head, split, row]: [R32; 4],
    seq_q: R32,
) -> R64 {
    let head = k.mad(batch, baked.heads_q as u32, head);
    let part = k.mad(head, splits, split);
    let before = k.mul_wide_u(part, seq_q);
    let row = k.zext(row);
    k.add(before, row)
}
