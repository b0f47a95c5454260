//! The gradients of sinks and of tables that many CTAs contribute to: each CTA leaves parts, and a kernel
//! adds them in a fixed order.

use attend::Sinks;
use problem::{Operand, Problem};
use ptx::{Access, Builder, CmpOp, Dim3, F32, Global, Launch, Pointer, R32, SpecialReg, Target};

use crate::PlanError;
use crate::contract::Contract;
use crate::derivatives::TableAxis;
use crate::draft::Draft;

/// Threads of a CTA that adds.
const THREADS: u32 = 256;
/// The temporary of the sinks' parts.
const SINK_PARTS: &str = "sink_parts";

/// Where warps leave their parts of the sinks' gradients, for tiles of query rows:
/// `[head][batch][tile][warp]`.
pub(super) struct SinkParts {
    sinks: Global,
    parts: Global,
    batch: R32,
    tiles: R32,
    warps: u32,
}

/// The number of tiles of query rows of a head, the number of batch entries with as many each, and the warps
/// of a tile.
pub(super) type TileCounts = ([u64; 2], u32);

impl SinkParts {
    /// Declares the parts, if the pass wants the gradients of sinks.
    pub fn declare(
        k: &mut Builder,
        c: &mut Contract<'_>,
        problem: &Problem,
        counts: TileCounts,
    ) -> Option<SinkParts> {
        if !problem.pass.wants().sinks {
            return None;
        }
        let sinks = c.operand(k, Operand::Sinks)?;
        let ([tiles, batch], warps) = counts;
        let bytes = 4 * problem.heads_q * parts_of_sink(counts);
        Some(SinkParts {
            sinks,
            parts: c.temporary(k, SINK_PARTS, bytes, Access::Write),
            batch: c.u32(k, "tile_batch", batch as u32),
            tiles: c.u32(k, "sink_tiles", tiles as u32),
            warps,
        })
    }

    /// The sink's probability in rows, times −D, from −L·log2 e and −D of the rows.
    pub fn part(&self, k: &mut Builder, head: R32, [minus_log_sums, minus_deltas]: [&[F32]; 2]) -> F32 {
        let sink = Sinks::of_head(k, self.sinks, head);
        let sum: F32 = k.mov(0.0);
        for (&minus_log_sum, &minus_delta) in minus_log_sums.iter().zip(minus_deltas) {
            let exponent = k.add(sink, minus_log_sum);
            let weight = k.ex2(exponent);
            k.mad_to(sum, weight, minus_delta, sum);
        }
        sum
    }

    /// Stores the part of warp `warp` of the tile at `[batch, head, tile]`: the sum over the lanes that
    /// differ in `bits`.
    pub fn store(
        &self,
        k: &mut Builder,
        [batch, head, tile]: [R32; 3],
        [warp, lane]: [R32; 2],
        (part, bits): (F32, &[u32]),
    ) {
        let sum = sum_of_lanes(k, part, bits);
        let before = k.mad(head, self.batch, batch);
        let of_tiles = k.mul_wide_u(before, self.tiles);
        let tile = k.zext(tile);
        let index = k.add(of_tiles, tile);
        let warp = k.zext(warp);
        let index = k.mad(index, i64::from(self.warps), warp);
        let to = Global { base: k.mad(index, 4, self.parts.base), ..self.parts };
        let first = k.setp_u(CmpOp::Eq, lane, 0);
        k.guarded(first, |k| k.st(to, sum));
    }
}

/// Parts of a sink's gradient.
fn parts_of_sink(([tiles, batch], warps): TileCounts) -> usize {
    (tiles * batch) as usize * warps as usize
}

/// The kernel that adds the parts of the sinks' gradients.
pub(super) fn draft_sinks<'a>(problem: &Problem, target: Target, counts: TileCounts) -> Draft<'a> {
    let sums = Sums {
        entry: "flash_backward_dsinks".to_owned(),
        parts: SINK_PARTS,
        out: Operand::DSinks,
        axes: vec![TableAxis::Head],
        extents: vec![problem.heads_q],
        heads: problem.heads_q,
        batch: 1,
        length: parts_of_sink(counts),
    };
    sums.draft(problem, target)
}

/// A kernel that adds parts `[head][batch][length]`. Its result has a dimension for each axis. The axes that
/// the result lacks are added up; all parts of a head and a batch entry are if no axis is a position.
pub(super) struct Sums {
    pub entry: String,
    pub parts: &'static str,
    pub out: Operand,
    pub axes: Vec<TableAxis>,
    /// The extents of the result, in the order of the axes.
    pub extents: Vec<usize>,
    pub heads: usize,
    pub batch: usize,
    pub length: usize,
}

/// The parameters of the kernel.
struct SumParams {
    parts: Option<Global>,
    out: Global,
    extents: Vec<R32>,
    elements: R32,
    heads: R32,
    batch: R32,
    length: R32,
}

impl Sums {
    /// The bytes of the parts.
    pub fn bytes(&self) -> usize {
        4 * self.heads * self.batch * self.length
    }

    /// Checks the number of elements.
    pub fn check(&self) -> Result<(), PlanError> {
        let elements = self.elements();
        crate::error::accept(
            "elements of a table's gradient",
            elements,
            elements < 1 << 31,
            "fewer than 2^31",
        )
    }

    fn elements(&self) -> u64 {
        self.extents.iter().fold(1, |product: u64, &extent| product.saturating_mul(extent as u64))
    }

    /// Whether a CTA computes an element, and not a thread.
    fn by_ctas(&self) -> bool {
        !self.axes.iter().any(|axis| matches!(axis, TableAxis::Query | TableAxis::Key))
    }

    /// The kernel. Without axes, the result is 0 and there are no parts.
    pub fn draft<'a>(self, problem: &Problem, target: Target) -> Draft<'a> {
        let mut k = Builder::kernel(&self.entry);
        k.max_threads(THREADS);
        let mut c = Contract::new(problem);
        let elements = self.elements();
        let parts = (!self.axes.is_empty())
            .then(|| c.temporary(&mut k, self.parts, self.bytes().max(4), Access::Read));
        let params = SumParams {
            parts,
            out: c.operand(&mut k, self.out).expect("the pass wants the gradient"),
            extents: (0..)
                .zip(&self.extents)
                .map(|(i, &extent)| c.u32(&mut k, &format!("extent_{i}"), extent as u32))
                .collect(),
            elements: c.u32(&mut k, "elements", elements as u32),
            heads: c.u32(&mut k, "heads", self.heads as u32),
            batch: c.u32(&mut k, "batch", self.batch as u32),
            length: c.u32(&mut k, "length", self.length as u32),
        };
        let by_ctas = self.by_ctas() && parts.is_some();
        let ctas = if by_ctas { elements } else { elements.div_ceil(THREADS.into()) };
        let launch = Launch::new(Dim3(ctas as u32, 1, 1), Dim3(THREADS, 1, 1));
        let entry = self.entry.clone();
        let body = move |k: &mut Builder| params.emit(k, &self.axes, by_ctas);
        Draft::new(k, c, (&entry, launch), target, body)
    }
}

impl SumParams {
    fn emit(&self, k: &mut Builder, axes: &[TableAxis], by_ctas: bool) {
        let thread = k.special(SpecialReg::TidX);
        let cta = k.special(SpecialReg::CtaidX);
        let element = if by_ctas { cta } else { k.mad(cta, THREADS, thread) };
        let beyond = k.setp_u(CmpOp::Ge, element, self.elements);
        k.exit_if(beyond);
        let sum: F32 = k.mov(0.0);
        if let Some(parts) = self.parts {
            self.add(k, (sum, parts), axes, (element, by_ctas.then_some(thread)));
        }
        let to = k.index(self.out, element, 4);
        if by_ctas {
            let sum = sum_of_cta(k, sum, thread);
            let first = k.setp_u(CmpOp::Eq, thread, 0);
            k.guarded(first, |k| k.st(to, sum));
        } else {
            k.st(to, sum);
        }
    }

    /// Adds the parts of an element, or with a thread the thread's share of them.
    fn add(
        &self,
        k: &mut Builder,
        (sum, parts): (F32, Global),
        axes: &[TableAxis],
        (element, thread): (R32, Option<R32>),
    ) {
        let all = |k: &mut Builder, count: R32| [k.mov(0), count];
        let (mut heads, mut batches) = (all(k, self.heads), all(k, self.batch));
        let mut position = None;
        let mut rest = element;
        for (axis, &extent) in axes.iter().zip(&self.extents).rev() {
            let index = k.rem_u(rest, extent);
            rest = k.div_u(rest, extent);
            let one = |k: &mut Builder, count: R32| {
                let next = k.add(index, 1);
                [index, k.min_u(next, count)] // none beyond the count
            };
            match axis {
                TableAxis::Head => heads = one(k, self.heads),
                TableAxis::Batch => batches = one(k, self.batch),
                TableAxis::Query | TableAxis::Key => position = Some(index),
                TableAxis::One => {}
            }
        }
        if let Some(position) = position {
            let exists = k.setp_u(CmpOp::Lt, position, self.length);
            heads[1] = k.selp(heads[1], 0, exists);
        }
        let ([first_head, heads], [first_batch, batches]) = (heads, batches);
        k.for_range(first_head, heads, 1, |k, head| {
            k.for_range(first_batch, batches, 1, |k, batch| {
                let before = k.mad(head, self.batch, batch);
                let before = k.mul_wide_u(before, self.length);
                let add = |k: &mut Builder, index: R32| {
                    let index = k.zext(index);
                    let index = k.add(before, index);
                    let at = Global { base: k.mad(index, 4, parts.base), ..parts };
                    let part: F32 = k.ld(at);
                    k.add_to(sum, sum, part);
                };
                match (position, thread) {
                    (Some(position), _) => add(k, position),
                    (None, Some(thread)) => k.for_range(thread, self.length, THREADS, add),
                    (None, None) => {}
                }
            });
        });
    }
}

/// The sum over lanes whose numbers differ in these bits.
pub(super) fn sum_of_lanes(k: &mut Builder, mut sum: F32, bits: &[u32]) -> F32 {
    for &bit in bits {
        let other = k.shfl_xor(sum, bit);
        sum = k.add(sum, other);
    }
    sum
}

/// The sum over the threads of a CTA, in thread 0.
fn sum_of_cta(k: &mut Builder, sum: F32, thread: R32) -> F32 {
    let of_warps = k.shared_array("sums", 4, THREADS / 32 * 4);
    let sum = sum_of_lanes(k, sum, &[1, 2, 4, 8, 16]);
    let warp = k.shr_u(thread, 5);
    let lane = k.and(thread, 31);
    let first = k.setp_u(CmpOp::Eq, lane, 0);
    let to = k.shared_index(of_warps, warp, 4);
    k.guarded(first, |k| k.st(to, sum));
    k.bar_sync();
    let all: F32 = k.mov(0.0);
    for warp in 0..THREADS / 32 {
        let part: F32 = k.ld(of_warps.at(i64::from(4 * warp)));
        k.add_to(all, all, part);
    }
    all
}
