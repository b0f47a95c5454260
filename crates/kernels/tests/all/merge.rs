//! The kernel that merges results over different keys, in the emulator, against a plain loop.

use emu::{Emulator, Options};
use flashcore_kernels::Arch;
use flashcore_kernels::merge::{self, StateMerge};
use problem::DType;
use ptx::Machine;

use crate::common::fp8::edit_text;
use crate::common::{decode, encode, loaded, stored};
use crate::tools;

const NONE: f64 = f64::NEG_INFINITY;

/// The results of the parts, each with NaN in rows that saw no key, and their LSEs.
fn parts(merge: &StateMerge) -> Vec<(Vec<f64>, Vec<f64>)> {
    let [batch, rows, heads, dim] = merge.extents;
    let mut state = 3u64;
    let mut noise = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f64 / (1u64 << 23) as f64 - 1.0
    };
    let round = |dtype: DType, x: f64| decode(dtype, encode(dtype, x));
    let part = |part: usize| {
        let count = batch * rows * heads;
        // No part sees a key of row 0, and each part none of a row of its own.
        let is_blind = |row: usize| row == 0 || row % 5 == part + 1;
        let mut lses: Vec<f64> = (0..count).map(|_| round(DType::F32, 12.0 * noise())).collect();
        let mut values = Vec::new();
        for row in 0..count {
            let blind = is_blind(row);
            let (head, token) = (row % heads, row / heads);
            if blind {
                lses[(token / rows * heads + head) * rows + token % rows] = NONE;
            }
            values.extend((0..dim).map(|_| if blind { f64::NAN } else { round(merge.dtype, noise()) }));
        }
        (values, lses)
    };
    (0..merge.parts).map(part).collect()
}

/// The merged result and its LSE by the kernel, in whose text `change` replaces a part by another.
fn run(merge: &StateMerge, change: Option<[&str; 2]>) -> Result<(Vec<f64>, Vec<f64>), String> {
    let mut program = merge::emit(merge, &Arch::SM_80).map_err(|error| error.to_string())?;
    if let Some([from, to]) = change {
        edit_text(&mut program, |text| text.replace(from, to));
    }
    let mut machine = Emulator::new(Options::default());
    let bytes_of = |dtype: DType, values: &[f64]| {
        stored(dtype, &values.iter().map(|&x| encode(dtype, x)).collect::<Vec<u32>>())
    };
    let given = parts(merge);
    let given: Vec<Vec<u8>> = given
        .iter()
        .flat_map(|(values, lses)| [bytes_of(merge.dtype, values), bytes_of(DType::F32, lses)])
        .collect();
    let arrays = merge.arrays();
    let mut buffers: Vec<_> = arrays.iter().map(|array| machine.allocate(array.bytes).unwrap()).collect();
    for (buffer, bytes) in buffers.iter_mut().zip(&given) {
        machine.upload(buffer, bytes).unwrap();
    }
    machine
        .launch(&program.kernel(0), &mut buffers.iter_mut().collect::<Vec<_>>())
        .map_err(|e| e.to_string())?;
    let mut read = |index: usize, dtype: DType| {
        let mut bytes = vec![0; arrays[index].bytes];
        machine.download(&buffers[index], &mut bytes).unwrap();
        loaded(dtype, &bytes).into_iter().map(|bits| decode(dtype, bits)).collect()
    };
    Ok((read(2 * merge.parts, merge.dtype), read(2 * merge.parts + 1, DType::F32)))
}

/// How far the kernel's results are from those of a loop in f64, in roundings of the type, and of f32 for the
/// LSE; infinite where one of both is no finite number.
fn error(merge: &StateMerge, (out, lse): &(Vec<f64>, Vec<f64>)) -> f64 {
    let [_, rows, heads, dim] = merge.extents;
    let given = parts(merge);
    let unit = match merge.dtype {
        DType::F16 => 2f64.powi(-11),
        DType::Bf16 => 2f64.powi(-8),
        _ => 2f64.powi(-22),
    };
    let far = |found: f64, right: f64, unit: f64| match found == right {
        true => 0.0,
        false if found.is_finite() && right.is_finite() => (found - right).abs() / unit,
        false => f64::INFINITY,
    };
    let mut worst: f64 = 0.0;
    for row in 0..out.len() / dim {
        let (head, token) = (row % heads, row / heads);
        let at = (token / rows * heads + head) * rows + token % rows;
        let top = given.iter().map(|(_, lses)| lses[at]).fold(NONE, f64::max);
        let seen: Vec<_> = given.iter().filter(|(_, lses)| lses[at] != NONE).collect();
        let total: f64 = seen.iter().map(|(_, lses)| (lses[at] - top).exp()).sum();
        let right = if seen.is_empty() { NONE } else { top + total.ln() };
        worst = worst.max(far(lse[at], right, 16.0 * 2f64.powi(-22)));
        for i in row * dim..(row + 1) * dim {
            let sum: f64 = seen.iter().map(|(values, lses)| (lses[at] - top).exp() * values[i]).sum();
            let right = if seen.is_empty() { 0.0 } else { sum / total };
            worst = worst.max(far(out[i], right, unit));
        }
    }
    worst
}

fn case(dtype: DType, parts: usize, extents: [usize; 4]) -> StateMerge {
    StateMerge { dtype, parts, extents, aligned: 16 }
}

#[test]
fn results_over_parts_of_the_keys_merge_to_the_whole() {
    for (dtype, parts, extents) in [
        (DType::F16, 2, [2, 3, 4, 64]),
        (DType::Bf16, 3, [1, 1, 8, 128]),
        (DType::F32, 2, [3, 5, 2, 80]),
        (DType::F16, 16, [1, 7, 3, 256]),
        (DType::Bf16, 1, [1, 2, 5, 512]),
        // Rows of 12 and of 36 bytes are moved by 4 bytes.
        (DType::F32, 4, [1, 9, 2, 3]),
        (DType::F16, 4, [2, 2, 3, 18]),
    ] {
        let merge = case(dtype, parts, extents);
        let found = run(&merge, None).unwrap_or_else(|e| panic!("{merge:?}: {e}"));
        let error = error(&merge, &found);
        assert!(error <= 1.0, "{merge:?}: {error}");
    }
    // Addresses that are no multiple of 16 bytes.
    let merge = StateMerge { aligned: 2, ..case(DType::F16, 2, [1, 3, 2, 64]) };
    let found = run(&merge, None).unwrap();
    assert!(error(&merge, &found) <= 1.0);
}

#[test]
fn faults_are_seen() {
    let merge = case(DType::F16, 3, [2, 3, 4, 64]);
    let fault = |name: &str, change: [&str; 2]| {
        let is_wrong = run(&merge, Some(change)).map_or(true, |found| error(&merge, &found) > 1.0);
        assert!(is_wrong, "not seen: {name}");
    };
    fault("the weights have base e", ["0f3FB8AA3B", "0f3F800000"]); // log2 e
    fault("the smallest LSE is the shift", ["max.NaN.f32", "min.NaN.f32"]);
    fault("rows that saw no key are read", ["setp.eq.f32", "setp.ne.f32"]);
    fault("no division", ["div.rn.f32", "add.f32"]);
    fault("the LSE lacks the logarithm", ["0f3F317218", "0f00000000"]); // ln 2
    fault("a thread beyond the end", ["setp.ge.u32", "setp.gt.u32"]);
}

#[test]
fn what_the_kernel_does_not_merge_is_refused() {
    let good = case(DType::F16, 2, [2, 3, 4, 64]);
    for (merge, words) in [
        (StateMerge { parts: 17, ..good }, "parts"),
        (StateMerge { parts: 0, ..good }, "parts"),
        (StateMerge { extents: [2, 0, 4, 64], ..good }, "rows"),
        (StateMerge { extents: [2, 3, 4, 63], ..good }, "head_dim 63"),
        (StateMerge { aligned: 1, ..good }, "multiples of 1"),
        (StateMerge { extents: [1 << 20, 1 << 20, 8, 64], ..good }, "2^31"),
        (StateMerge { dtype: DType::E4m3, ..good }, "e4m3"),
    ] {
        let error = merge::emit(&merge, &Arch::SM_90).unwrap_err().to_string();
        assert!(error.contains(words), "{merge:?}: {error}");
    }
}

#[test]
fn kernels_assemble_without_spills() {
    let merges = [(DType::F16, 2), (DType::Bf16, 16), (DType::F32, 16)];
    let programs = merges.map(|(dtype, parts)| {
        merge::emit(&case(dtype, parts, [1, 7, 3, 128]), &Arch::SM_90).unwrap().kernel(0)
    });
    let Some(facts) = tools::facts(&programs.iter().collect::<Vec<_>>()) else { return };
    for (merge, facts) in merges.iter().zip(facts) {
        assert!(
            facts.spills == 0 && facts.registers <= 128,
            "{merge:?}: {} {}",
            facts.spills,
            facts.registers
        );
    }
}
