//! The kernels of a quantisation: launches and bodies.

use problem::{Problem, Quantization};
use ptx::{Builder, CmpOp, R32};

use super::code::{Passes, QuantizationCode};
use super::place::{CtaRows, QuantizeParams, Sizes, Work};
use super::smooth;
use super::units::{largest_of_cluster, largest_of_cta, sign_words};
use crate::Arch;
use crate::contract::Contract;
use crate::draft::Draft;

const ENTRY: &str = "flash_quantize";
const FIRST_ENTRY: &str = "flash_quantize_largest";
const SUMS_ENTRY: &str = "flash_quantize_sums";

/// The kernels of a quantisation that was checked.
pub(super) fn drafts(
    code: &QuantizationCode,
    problem: &Problem,
    options: &Quantization,
    arch: &Arch,
) -> Vec<Draft<'static>> {
    let (code, sizes) = (*code, Sizes::new(code, problem, options));
    let rotation = options.rotation(problem, code.tensor);
    let signs = rotation.as_ref().map_or_else(Vec::new, sign_words);
    let draft = |(entry, body): (&str, Body), (code, sizes): (QuantizationCode, &Sizes), work| {
        let mut k = Builder::kernel(entry);
        k.max_threads(code.threads);
        if code.rotated {
            k.min_ctas_per_sm(code.resident_threads() / code.threads);
        }
        let mut contract = Contract::new(problem);
        let signs: &[u32] = if code.rotated { &signs } else { &[] };
        let params = QuantizeParams::declare(&mut k, &mut contract, (&code, sizes), (problem, signs), work);
        let launch = sizes.launch(&code);
        Draft::new(k, contract, (entry, launch), arch.target(), move |k| body(k, code, params))
    };
    let rounding: (&str, Body) = match code.passes {
        Passes::Held { .. } => (ENTRY, held),
        Passes::Two { .. } => (ENTRY, round),
    };
    let mut drafts = Vec::new();
    if code.smoothed {
        let of_sums = code.of_sums();
        let sizes = Sizes::of_sums(&of_sums, problem);
        drafts.push(draft((SUMS_ENTRY, smooth::add_rows), (of_sums, &sizes), Work::Add));
        drafts.push(smooth::average(problem, code, rotation.as_ref(), arch));
    }
    if matches!(code.passes, Passes::Two { .. }) {
        drafts.push(draft((FIRST_ENTRY, find_largest), (code, &sizes), Work::FindLargest));
    }
    drafts.push(draft(rounding, (code, &sizes), Work::Round));
    drafts
}

/// Emits the body of a kernel.
type Body = fn(&mut Builder, QuantizationCode, QuantizeParams);

/// One kernel: a CTA or a cluster holds all rows of a factor.
fn held(k: &mut Builder, code: QuantizationCode, params: QuantizeParams) {
    let place = CtaRows::new(k, code, params);
    place.exit_without_rows(k);
    if code.cluster() > 1 {
        k.cluster_arrive_relaxed();
    }
    let zero: R32 = k.mov(0);
    let tile = place.load(k, (place.part, zero));
    let most: R32 = k.mov(0);
    let shares = tile.shares.iter();
    let before: Vec<_> = shares.map(|(share, _)| place.units.before_pairs(k, share)).collect();
    let all: Vec<_> = before.iter().map(|units| place.units.add_pairs(k, units)).collect();
    place.units.raise(k, most, &before, |_| all.concat());
    let largest = match code.cluster() {
        1 => largest_of_cta(k, &code, place.thread, most),
        _ => largest_of_cluster(k, &code, (place.thread, place.part), most),
    };
    let multiplier = place.store_factor(k, largest);
    for (number, units) in all.iter().enumerate() {
        place.store(k, (&tile, number), units, multiplier);
    }
}

/// The first of two kernels: each CTA finds the largest magnitude of its part.
fn find_largest(k: &mut Builder, code: QuantizationCode, params: QuantizeParams) {
    let place = CtaRows::new(k, code, params);
    let most: R32 = k.mov(0);
    place.for_tiles(k, |k, tile| {
        for (share, _) in &tile.shares {
            let before = [place.units.before_pairs(k, share)];
            place.units.raise(k, most, &before, |k| place.units.add_pairs(k, &before[0]));
        }
    });
    let largest = largest_of_cta(k, &code, place.thread, most);
    if let Some(to) = place.largest(k) {
        let to = k.index(to, place.part, 4);
        let is_first = k.setp_u(CmpOp::Eq, place.thread, 0);
        k.guarded(is_first, |k| k.st(to, largest));
    }
}

/// The second of two kernels: each CTA rounds its part.
fn round(k: &mut Builder, code: QuantizationCode, params: QuantizeParams) {
    let place = CtaRows::new(k, code, params);
    let most: R32 = k.mov(0);
    if let Some(from) = place.largest(k) {
        let from = k.index(from, place.thread, 4);
        let exists = k.setp_u(CmpOp::Lt, place.thread, place.params.parts);
        k.guarded(exists, |k| k.ld_to(most, from));
    }
    let largest = largest_of_cta(k, &code, place.thread, most);
    let multiplier = place.store_factor(k, largest);
    place.for_tiles(k, |k, tile| {
        for (number, (share, _)) in tile.shares.iter().enumerate() {
            let units = place.units.elements(k, share);
            place.store(k, (&tile, number), &units, multiplier);
        }
    });
}
