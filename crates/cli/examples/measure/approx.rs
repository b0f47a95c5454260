//! Records how a GPU computes its approximate instructions: `approx FOLDER [SAMPLES]`. For each instruction
//! it prints the distance of the emulator from the device on SAMPLES (65536; a power of two) mantissas of
//! every sign and exponent. The folder gets `facts.json`, which holds these figures and the properties that
//! repeat from octave to octave, and samples of results from which exact tables are made. The samples are
//! zlib streams of the results' distance to [`baseline`], zigzag-encoded, as four planes of bytes.

use std::path::Path;
use std::time::Instant;

use bench::provenance::Provenance;
use calibrate::approx::{Agreement, Subject};
use driver::Gpu;
use emu::numerics::approx::Function;
use host::store;
use ptx::{Machine, Target};
use rayon::prelude::*;
use serde_json::{Value, json};

use crate::{Outcome, Usage};

/// Samples per sign and exponent that are written to the folder.
const KEPT: u32 = 512;

pub fn main(args: &[String]) -> Outcome {
    let samples = args.get(1).map_or(Ok(1 << 16), |n| n.parse());
    let (Some(folder), Ok(samples)) = (args.first(), samples) else {
        return Err(Usage.into());
    };
    run(Path::new(folder), samples).map(|()| true)
}

fn run(folder: &Path, count: u32) -> Result<(), Box<dyn std::error::Error>> {
    std::fs::create_dir_all(folder)?;
    let mut gpu = Gpu::open(0)?;
    let (major, minor) = gpu.info().capability;
    let (sm, target, start) = (major * 10 + minor, gpu.target(), Instant::now());
    println!("{}: {}", gpu.info().name, json!(Provenance::of_gpu(gpu.info())));
    let mut facts = Vec::new();
    for subject in Subject::all(sm) {
        // A failure of one instruction is printed, and the others continue.
        let fact = one(&mut gpu, target, subject, count, folder).unwrap_or_else(|error| {
            println!("FAILED {}: {error}", subject.name());
            json!({ "instruction": subject.name(), "failed": error.to_string() })
        });
        println!("   {:.1} s", start.elapsed().as_secs_f64());
        facts.push(fact);
    }
    let all = json!({ "sm": sm, "provenance": Provenance::of_gpu(gpu.info()), "facts": facts });
    store::write(&folder.join("facts.json"), serde_json::to_string_pretty(&all)?.as_bytes())?;
    Ok(())
}

fn one(
    gpu: &mut Gpu,
    target: Target,
    subject: Subject,
    count: u32,
    folder: &Path,
) -> Result<Value, Box<dyn std::error::Error>> {
    let inputs = subject.inputs(count);
    let results = subject.run(gpu, target, &inputs)?;
    let agreement = Agreement::of(subject, &inputs, &results, &subject.emulated(&inputs));
    println!(
        "{:28} {} of {} differ, at most {} ulp, {} NaN",
        agreement.instruction, agreement.differing, agreement.results, agreement.most_ulps, agreement.nan
    );
    println!("   {}", json!(agreement.histogram));
    let mut fact = json!(agreement);
    fact["octaves"] = octaves(gpu, target, subject)?;
    fact["special"] = special(gpu, target, subject)?;
    let name = subject.name().replace('.', "_");
    dump(gpu, target, subject, &subject.inputs(KEPT), &folder.join(format!("{name}.samples.z")))?;
    for (label, inputs) in stretches(subject) {
        dump(gpu, target, subject, &inputs, &folder.join(format!("{name}.{label}.z")))?;
    }
    Ok(fact)
}

/// Runs of inputs that together cover a function's whole table.
fn stretches(subject: Subject) -> Vec<(String, Vec<u32>)> {
    let run = |first: f32, count: u32, step: u32| {
        let inputs = (0..count).into_par_iter().map(|i| first.to_bits() + i * step).collect();
        (format!("from_{first}_count_{count}_step_{step}"), inputs)
    };
    let Subject::F32 { function, ftz } = subject else { return Vec::new() };
    if !ftz && function != Function::Tanh {
        return Vec::new();
    }
    match function {
        Function::Rcp => vec![run(1.0, 1 << 23, 1)],
        Function::Rsqrt | Function::Sqrt => vec![run(1.0, 1 << 24, 1)],
        Function::Ex2 => vec![run(1.0, 1 << 23, 1), run(0.5, 1 << 21, 4), run(-1.0, 1 << 21, 4)],
        Function::Lg2 => vec![run(0.5, 1 << 24, 1), run(2.0, 1 << 21, 4)],
        Function::Sin | Function::Cos => vec![run(0.0625, 1 << 20, 16), run(0.25, 1 << 21, 16)],
        Function::Tanh => vec![run(0.015625, 10 << 19, 16)],
    }
}

/// For inputs with 4096 mantissas and every exponent: the number whose result equals that of the base octave,
/// rescaled.
fn octaves(gpu: &mut Gpu, target: Target, subject: Subject) -> Result<Value, Box<dyn std::error::Error>> {
    let Subject::F32 { function, ftz: true } = subject else { return Ok(Value::Null) };
    let inputs: Vec<u32> =
        subject.inputs(4096).into_iter().filter(|x| f32::from_bits(*x).is_normal()).collect();
    let mut facts = serde_json::Map::new();
    for rule in [Rule::Down, Rule::Nearest, Rule::TowardZero, Rule::Even] {
        let moved: Option<Vec<(u32, i32, bool)>> = inputs.iter().map(|&x| moved(function, x, rule)).collect();
        let Some(moved) = moved else { continue };
        let bases: Vec<u32> = moved.iter().map(|m| m.0).collect();
        let (here, there) = (subject.run(gpu, target, &inputs)?, subject.run(gpu, target, &bases)?);
        let mut wrong = 0u64;
        let mut first = Value::Null;
        let mut exponents = std::collections::BTreeMap::<u32, u64>::new();
        for (i, (&here, &there)) in here.iter().zip(&there).enumerate() {
            let expected = scaled(there, moved[i].1, moved[i].2);
            if expected != here {
                wrong += 1;
                *exponents.entry(inputs[i] >> 23).or_default() += 1;
                if first.is_null() {
                    let hex = [inputs[i], here, expected].map(|x| format!("{x:08x}"));
                    first = json!(hex);
                }
            }
        }
        facts.insert(
            format!("{rule:?}"),
            json!({ "inputs": inputs.len(), "otherwise": wrong, "first": first, "exponents": exponents }),
        );
        if function != Function::Ex2 {
            break;
        }
    }
    println!("   octaves {}", summary(&facts));
    Ok(Value::Object(facts))
}

fn summary(facts: &serde_json::Map<String, Value>) -> String {
    let each =
        facts.iter().map(|(rule, fact)| format!("{rule}: {} of {}", fact["otherwise"], fact["inputs"]));
    each.collect::<Vec<_>>().join(", ")
}

/// Possible roundings of an exponential's input bits below 2⁻²³.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Rule {
    Down,
    Nearest,
    TowardZero,
    Even,
}

/// The matching input of the base octave, the power of two between the two results, and whether their signs
/// differ.
fn moved(function: Function, x: u32, rule: Rule) -> Option<(u32, i32, bool)> {
    let (sign, exponent, mantissa) = (x >> 31 == 1, (x >> 23 & 0xff) as i32 - 127, x & 0x7f_ffff);
    match function {
        Function::Rcp => Some((0x3f80_0000 | mantissa, -exponent, sign)),
        Function::Rsqrt | Function::Sqrt if !sign => {
            let (odd, half) = (exponent.rem_euclid(2), exponent.div_euclid(2));
            let base = ((127 + odd) as u32) << 23 | mantissa;
            Some((base, if function == Function::Sqrt { half } else { -half }, false))
        }
        Function::Rsqrt | Function::Sqrt => Some((x, 0, false)),
        Function::Ex2 => {
            let value = f64::from(f32::from_bits(x)).clamp(-200.0, 200.0) * 8_388_608.0;
            let fixed = match rule {
                Rule::Down => value.floor(),
                Rule::Nearest => (value + 0.5).floor(),
                Rule::TowardZero => value.trunc(),
                Rule::Even => value.round_ties_even(),
            } as i64;
            // 1 + the fraction lies in [1, 2).
            Some((0x3f80_0000 | (fixed & 0x7f_ffff) as u32, (fixed >> 23) as i32 - 1, false))
        }
        Function::Lg2 | Function::Sin | Function::Cos | Function::Tanh => None,
    }
}

/// A normal f32 times a power of two. Subnormal results become 0.
fn scaled(bits: u32, power: i32, negative: bool) -> u32 {
    let sign = u32::from(negative) << 31;
    let exponent = (bits >> 23 & 0xff) as i32;
    if exponent == 0 || exponent == 255 {
        return bits ^ sign;
    }
    match exponent + power {
        ..=0 => bits & 0x8000_0000 ^ sign,
        255.. => (bits & 0x8000_0000 | 0x7f80_0000) ^ sign,
        e => (bits & 0x807f_ffff | (e as u32) << 23) ^ sign,
    }
}

/// The results for the special values that the tables of the PTX ISA list, and for some others.
fn special(gpu: &mut Gpu, target: Target, subject: Subject) -> Result<Value, Box<dyn std::error::Error>> {
    let magnitudes = [
        0u32,
        1,
        0x40_0000,
        0x7f_ffff,
        0x80_0000,
        0x3f7f_ffff,
        0x3f80_0000,
        0x3f80_0001,
        0x7f7f_ffff,
        0x7f80_0000,
        0x7f80_0001,
        0x7fff_ffff,
        0x42fc_0000,
        0x4300_0000,
        0x4316_0000,
        0x7e80_0000,
    ];
    let inputs: Vec<u32> = magnitudes.into_iter().flat_map(|x| [x, x | 0x8000_0000]).collect();
    let results = subject.run(gpu, target, &inputs)?;
    let pairs = inputs.iter().zip(results).map(|(x, y)| (format!("{x:08x}"), json!(format!("{y:08x}"))));
    Ok(Value::Object(pairs.collect()))
}

fn dump<M: Machine<Error: 'static>>(
    machine: &mut M,
    target: Target,
    subject: Subject,
    inputs: &[u32],
    path: &Path,
) -> Result<(), Box<dyn std::error::Error>> {
    let results = subject.run(machine, target, inputs)?;
    let apart: Vec<u32> = results
        .par_iter()
        .zip(inputs)
        .map(|(&y, &x)| {
            let apart = y.wrapping_sub(baseline(subject, x)) as i32;
            (apart << 1 ^ apart >> 31) as u32
        })
        .collect();
    let planes: Vec<u8> =
        [0, 8, 16, 24].iter().flat_map(|shift| apart.iter().map(move |x| (x >> shift) as u8)).collect();
    store::write(path, &miniz_oxide::deflate::compress_to_vec_zlib(&planes, 6))?;
    Ok(())
}

/// The correctly rounded value, or 0 where a dump holds the results themselves. It is computed from f64
/// products and sums alone, so that every machine gets the same value.
fn baseline(subject: Subject, x: u32) -> u32 {
    let Subject::F32 { function, .. } = subject else { return 0 };
    let x = f64::from(f32::from_bits(x));
    let y = match function {
        Function::Ex2 => power(x),
        Function::Lg2 => logarithm(x),
        Function::Rcp => 1.0 / x,
        Function::Rsqrt => 1.0 / x.sqrt(),
        Function::Sqrt => x.sqrt(),
        Function::Sin => sine(x / std::f64::consts::TAU),
        Function::Cos => sine(x / std::f64::consts::TAU + 0.25),
        Function::Tanh if x.abs() < 1e-4 => x,
        Function::Tanh => {
            let e = power(2.0 * x.clamp(-50.0, 50.0) * std::f64::consts::LOG2_E);
            (e - 1.0) / (e + 1.0)
        }
    };
    (y as f32).to_bits()
}

/// 2^x.
fn power(x: f64) -> f64 {
    let x = x.clamp(-200.0, 200.0);
    let whole = x.round();
    let t = (x - whole) * std::f64::consts::LN_2;
    let series = (1..=18).rev().fold(1.0, |sum, k| 1.0 + sum * t / f64::from(k));
    series * f64::from_bits(((1023 + whole as i64) as u64) << 52)
}

/// log₂ x of a normal f32.
fn logarithm(x: f64) -> f64 {
    let bits = x.to_bits();
    let offset = bits.wrapping_sub(std::f64::consts::FRAC_1_SQRT_2.to_bits());
    let exponent = (offset as i64) >> 52;
    let m = f64::from_bits(bits.wrapping_sub((exponent << 52) as u64));
    let s = (m - 1.0) / (m + 1.0);
    let series = (0..=14).rev().fold(0.0, |sum, k| 1.0 / f64::from(2 * k + 1) + sum * s * s);
    2.0 * std::f64::consts::LOG2_E * s * series + exponent as f64
}

/// sin 2πt.
fn sine(t: f64) -> f64 {
    let t = t - t.round();
    // sin is odd, and symmetric about a quarter.
    let t = if t > 0.25 {
        0.5 - t
    } else if t < -0.25 {
        -0.5 - t
    } else {
        t
    };
    let a = t * std::f64::consts::TAU;
    let series = (1..=12).rev().fold(1.0, |sum, k| 1.0 - sum * a * a / f64::from(2 * k * (2 * k + 1)));
    a * series
}
