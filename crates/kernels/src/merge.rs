//! The kernel that merges results of the same queries over different keys.
//!
//! A thread merges up to 16 bytes of one row of O. It reads the LSEs of the row itself, so threads exchange
//! nothing, and all loads of a thread are under way together.

use std::f32::consts::{LN_2, LOG2_E};

use problem::{DType, Problem};
use ptx::{Access, Builder, CmpOp, Dim3, F32, Global, Launch, R32, SpecialReg};
use tile::divide;

use crate::contract::{Contract, KernelArray};
use crate::draft::Draft;
use crate::error::accept;
use crate::program::Contracts;
use crate::words::{elements, half_of, load_words, store_words};
use crate::{Arch, KernelError, PlanError, Program, draft};

/// The name of the generator in errors.
const NAME: &str = "merge";
const ENTRY: &str = "flash_merge";
/// Threads of a CTA.
const THREADS: u32 = 256;
/// Bytes that a thread merges, at most.
const CHUNK: usize = 16;
/// The names of the results, and of their LSEs.
const OUTS: [&str; StateMerge::MOST] = [
    "out_0", "out_1", "out_2", "out_3", "out_4", "out_5", "out_6", "out_7", "out_8", "out_9", "out_10",
    "out_11", "out_12", "out_13", "out_14", "out_15",
];
const LSES: [&str; StateMerge::MOST] = [
    "lse_0", "lse_1", "lse_2", "lse_3", "lse_4", "lse_5", "lse_6", "lse_7", "lse_8", "lse_9", "lse_10",
    "lse_11", "lse_12", "lse_13", "lse_14", "lse_15",
];

/// A merge of results: dense rows `[batch, row, head, dim]`, each with a dense LSE `[batch, head, row]`
/// (natural logarithm, f32).
///
/// The weight of part i is `w_i = exp(lse_i - m)`, where `m` is the largest LSE of the row. O becomes
/// `sum(w_i O_i) / sum(w_i)`, and the LSE `m + ln sum(w_i)`. Sums are f32 in the order of the parts.
///
/// A part whose LSE is −∞ saw no key, and the values of its row have no influence. A row without keys in
/// any part is 0, and its LSE −∞.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StateMerge {
    /// Element type of all results.
    pub dtype: DType,
    /// Number of results that are merged, 1 to [`StateMerge::MOST`].
    pub parts: usize,
    /// Batch entries, rows, heads, and elements of a row.
    pub extents: [usize; 4],
    /// The addresses of the results are multiples of this number of elements, up to 16.
    pub aligned: usize,
}

/// The properties on which the code of a merge depends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MergeCode {
    dtype: DType,
    parts: usize,
    dim: u32,
    /// Elements that a thread merges.
    width: u32,
}

/// Emits the kernel of a merge.
///
/// # Errors
/// When extents, types or the number of parts are outside of what the kernel takes.
pub fn emit(merge: &StateMerge, arch: &Arch) -> Result<Program, KernelError> {
    let code = merge.code(arch)?;
    draft::emit(vec![kernel(code, merge, arch)])
        .map_err(|violations| KernelError::Generator { family: NAME, violations })
}

/// The properties on which the code of a merge depends, and the launch contract, without the code itself.
///
/// # Errors
/// As [`emit`].
pub fn bind(merge: &StateMerge, arch: &Arch) -> Result<(MergeCode, Contracts), KernelError> {
    let code = merge.code(arch)?;
    Ok((code, draft::contracts(vec![kernel(code, merge, arch)])))
}

impl StateMerge {
    /// Results that one launch merges, at most.
    pub const MOST: usize = 16;

    /// All arrays of the kernel, in the order of its buffers: the result and the LSE of each part, and then
    /// the merged ones.
    pub fn arrays(&self) -> Vec<KernelArray> {
        let rows: usize = self.extents[..3].iter().product();
        let pair = |names: [&'static str; 2], access| {
            let bytes = [rows * self.extents[3] * self.dtype.bytes(), rows * 4];
            [0, 1].map(|i| KernelArray { name: names[i], bytes: bytes[i], access })
        };
        let parts =
            (0..self.parts.min(StateMerge::MOST)).flat_map(|i| pair([OUTS[i], LSES[i]], Access::Read));
        parts.chain(pair(["out", "lse"], Access::Write)).collect()
    }

    /// The code of the merge, which is checked first.
    fn code(&self, arch: &Arch) -> Result<MergeCode, PlanError> {
        let StateMerge { dtype, parts, extents, aligned } = *self;
        accept("sm", arch.sm.into(), arch.sm >= 80, "80 and later")?;
        if dtype.is_fp8() {
            return Err(PlanError::unsupported(NAME, "the element type", dtype, "f16, bf16 or f32"));
        }
        accept("parts", parts as u64, (1..=StateMerge::MOST).contains(&parts), "1 to 16")?;
        for (what, extent) in ["batch", "rows", "heads", "head_dim"].into_iter().zip(extents) {
            accept(what, extent as u64, (1..1 << 31).contains(&extent), "1 to 2^31 - 1")?;
        }
        let size = dtype.bytes();
        let widths = [8, 4, 2, 1].into_iter().filter(|width| (4..=CHUNK).contains(&(width * size)));
        let mut fitting =
            widths.filter(|&width| extents[3].is_multiple_of(width) && aligned.is_multiple_of(width));
        let Some(width) = fitting.next() else {
            let accepted = "multiples of 4 bytes for rows and addresses";
            let value = format!("head_dim {} at multiples of {aligned} elements", extents[3]);
            return Err(PlanError::unsupported(NAME, "the alignment of rows", value, accepted));
        };
        let units =
            extents[..3].iter().fold((extents[3] / width) as u128, |all, &x| all.saturating_mul(x as u128));
        let most = u64::try_from(units).unwrap_or(u64::MAX);
        accept("pieces of 16 bytes in all rows", most, most < 1 << 31, "fewer than 2^31")?;
        Ok(MergeCode { dtype, parts, dim: extents[3] as u32, width: width as u32 })
    }
}

/// The kernel of a merge that was checked.
fn kernel(code: MergeCode, merge: &StateMerge, arch: &Arch) -> Draft<'static> {
    let mut k = Builder::kernel(ENTRY);
    k.max_threads(THREADS);
    let problem = Problem::mission(); // the kernel has no operand of a problem
    let mut contract = Contract::new(&problem);
    let starts = merge.arrays().into_iter();
    let starts = starts.map(|array| contract.array(&mut k, array.name, array.bytes, array.access)).collect();
    let [batch, rows, heads, _] = merge.extents.map(|extent| extent as u32);
    let units = batch * rows * heads * (code.dim / code.width);
    let params = Params {
        starts,
        units: contract.u32(&mut k, "units", units),
        rows: contract.u32(&mut k, "rows", rows),
        heads: contract.u32(&mut k, "heads", heads),
    };
    let launch = Launch::new(Dim3(units.div_ceil(THREADS), 1, 1), Dim3(THREADS, 1, 1));
    Draft::new(k, contract, (ENTRY, launch), arch.target(), move |k| body(k, code, &params))
}

struct Params {
    /// The arrays, in the order of [`StateMerge::arrays`].
    starts: Vec<Global>,
    /// Units of `width` elements in all rows.
    units: R32,
    rows: R32,
    heads: R32,
}

fn body(k: &mut Builder, code: MergeCode, params: &Params) {
    let (cta, thread) = (k.special(SpecialReg::CtaidX), k.special(SpecialReg::TidX));
    let unit = k.mad(cta, THREADS, thread);
    let outside = k.setp_u(CmpOp::Ge, unit, params.units);
    k.exit_if(outside);
    let of_row = code.dim / code.width;
    let place = Place::new(k, params, unit, of_row);
    let (parts, merged) = params.starts.split_at(2 * code.parts);
    let lses: Vec<F32> = parts.chunks_exact(2).map(|part| place.lse(k, part[1])).collect();
    let bytes = code.width * code.dtype.bytes() as u32;
    let words = |k: &mut Builder, part: &[Global]| {
        let at = k.index(part[0], unit, bytes);
        load_words(k, at, bytes)
    };
    let words: Vec<_> = parts.chunks_exact(2).map(|part| words(k, part)).collect();

    let top = k.mov(lses[0]);
    lses[1..].iter().for_each(|&lse| k.max_nan_to(top, top, lse));
    // −∞ − (−∞) would be NaN.
    let none = k.setp_f(CmpOp::Eq, top, f32::NEG_INFINITY);
    let shift: F32 = k.selp(0.0, top, none);
    let (total, sums) = (k.mov(0.0), (0..code.width).map(|_| k.mov(0.0)).collect::<Vec<F32>>());
    for (&lse, words) in lses.iter().zip(&words) {
        let below = k.sub(lse, shift);
        let below = k.mul(below, LOG2_E);
        let weight = k.ex2(below);
        k.add_to(total, total, weight);
        let unread = k.setp_f(CmpOp::Eq, lse, f32::NEG_INFINITY);
        for (&sum, value) in sums.iter().zip(elements(k, code.dtype, words)) {
            let value: F32 = k.selp(0.0, value, unread);
            k.mad_to(sum, weight, value, sum);
        }
    }
    let divisor: F32 = k.selp(1.0, total, none);
    let results: Vec<F32> = sums.iter().map(|&sum| k.div(sum, divisor)).collect();
    let to = k.index(merged[0], unit, bytes);
    let words = match half_of(code.dtype) {
        Some(half) => results.chunks_exact(2).map(|xy| k.pack(half, xy[0], xy[1])).collect(),
        None => results.iter().map(|&x| k.to_bits(x)).collect::<Vec<_>>(),
    };
    store_words(k, to, &words);
    let is_first = k.setp_u(CmpOp::Eq, place.in_row, 0);
    k.if_(is_first, |k| {
        let log = k.lg2(divisor);
        let lse = k.mad(log, LN_2, top);
        let to = k.index(merged[1], place.lse, 4);
        k.st(to, lse);
    });
}

/// The row of a thread.
struct Place {
    /// The unit in the row.
    in_row: R32,
    /// The element of the LSE.
    lse: R32,
}

impl Place {
    fn new(k: &mut Builder, params: &Params, unit: R32, of_row: u32) -> Place {
        let row = divide(k, unit, of_row);
        let before = k.mul(row, of_row);
        let in_row = k.sub(unit, before);
        let quotient = |k: &mut Builder, n: R32, by: R32| {
            let quotient = k.div_u(n, by);
            let before = k.mul(quotient, by);
            (quotient, k.sub(n, before))
        };
        let (token, head) = quotient(k, row, params.heads);
        let (entry, row) = quotient(k, token, params.rows);
        let lse = k.mad(entry, params.heads, head);
        Place { in_row, lse: k.mad(lse, params.rows, row) }
    }

    fn lse(&self, k: &mut Builder, array: Global) -> F32 {
        let at = k.index(array, self.lse, 4);
        k.ld(at)
    }
}
