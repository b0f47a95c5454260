//! Tests of scales and caps far from usual ones: large, small, negative, with inputs that give logits of
//! usual size and with others.

use crate::common::each::each;
use crate::common::factors::with_factors;
use crate::common::{self, fp8};
use crate::tools;
use attend::{Chains, Rescale, Sums};
use emu::{Emulator, Options};
use flashcore_kernels::forward::mma::MmaPlan;
use flashcore_kernels::forward::wgmma::{Rescaling, WgmmaPlan};
use flashcore_kernels::{Arch, Family, Plan, emit};
use problem::program::library as lib;
use problem::{
    Band, DType, ElementType, Layout, Operand, PassKind, Problem, Program, Programs, Table, Tensor,
};
use ptx::Kernel;

/// A problem with rows that see nothing, and the LSE.
fn problem(dtype: DType) -> Problem {
    let keys = 50;
    Problem::new(1, 2, 60, 64, dtype).with_seq_kv(keys, Layout::Bhsd).with_band(Band::CAUSAL).with_lse(true)
}

/// Runs every family that supports the problem.
fn check(problem: &Problem, size: f64) {
    let mut ran = 0;
    for family in Family::of_pass(PassKind::Forward) {
        let Ok(plan) = family.default_for(problem, &Arch::SM_90) else { continue };
        let options = Options { seed: 3, ..Options::default() };
        common::run_of_size(&mut Emulator::new(options), problem, &plan, &Arch::SM_90, (3, size)).check();
        ran += 1;
    }
    assert!(ran > 0, "{problem:?}");
}

/// The size of queries and keys with which logits have a deviation of 4.
fn size(problem: &Problem) -> f64 {
    let scale = f64::from(problem.softmax_scale()).abs();
    (4.0 / (scale * (problem.head_dim as f64).sqrt())).sqrt()
}

const TYPES: [DType; 3] = [DType::F16, DType::Bf16, DType::F32];

/// Logits of usual size, and one-hot rows.
#[test]
fn scales_of_any_size_are_applied() {
    let scales = [100.0, 129.0, 1e6, 9e15, 2e30, -9e15, 1e-3, 1e-20, 1e-38, 1e-42, 0.0];
    let cases: Vec<(DType, f32)> =
        TYPES.iter().flat_map(|&dtype| scales.map(|scale| (dtype, scale))).collect();
    each(&cases, |&(dtype, scale)| {
        let mut problem = problem(dtype);
        problem.score.scale = Some(scale);
        // Inputs must be numbers of the type, and products numbers of f32.
        let usual = size(&problem);
        if dtype != DType::F16 && (1e-12..1e12).contains(&usual) || (1e-2..1e3).contains(&usual) {
            check(&problem, usual);
        }
        // The bound holds for exact logits. Those of several hundred have few bits after the point in f32.
        if dtype != DType::F32 || !(30.0..1e5).contains(&scale.abs()) {
            check(&problem, 1.0);
        }
    });
}

/// Caps from tiny to huge, of logits that are small beside the cap and of others.
#[test]
fn caps_of_any_size_are_applied() {
    let cases: Vec<(DType, f32)> = [DType::F16, DType::F32]
        .iter()
        .flat_map(|&dtype| [1e-38, 1e-3, 64.0, 65.0, 1e4, 1e7, 1e12, 1e30].map(|cap| (dtype, cap)))
        .collect();
    each(&cases, |&(dtype, cap)| {
        // Logits of many thousands have few bits after the point in f32.
        for scale in
            [0.125, 1.0, 1e-3 * cap, cap / 8.0].into_iter().filter(|&s| dtype == DType::F16 || s < 8.0)
        {
            let mut problem = problem(dtype).with_softcap(cap);
            problem.score.scale = Some(scale);
            if problem.check().is_ok() {
                check(&problem, 1.0);
            }
        }
    });
}

/// A bias after a wide scale, a wide cap, and both.
#[test]
fn programs_take_wide_logits() {
    let mut problem = problem(DType::Bf16);
    let strides = vec![0, 0, problem.seq_kv as i64, 1];
    let extents = vec![1, 2, problem.seq_q, problem.seq_kv];
    problem.programs = Programs {
        score: Some(Program::new(&lib::bias(0)).unwrap()),
        tables: vec![Table { dtype: ElementType::Bf16, extents, strides }],
        ..Programs::default()
    };
    for (scale, cap) in [(9e15, None), (-3e7, None), (1.0, Some(1e6)), (9e15, Some(1e12)), (9e15, Some(30.0))]
    {
        problem.score.scale = Some(scale);
        problem.score.softcap = cap;
        check(&problem, size(&problem));
        // Beside logits near a large cap, f32 has no bits for the bias.
        if cap.is_none_or(|cap| cap < 1e9) {
            check(&problem, 1.0);
        }
    }
}

/// The default kernels for wide logits need no more registers than a thread has.
#[test]
fn kernels_of_wide_logits_assemble_without_spills() {
    let mut programs = Vec::new();
    for (dim, dtype) in [64, 128].into_iter().flat_map(|dim| [DType::F16, DType::Bf16].map(|t| (dim, t))) {
        for cap in [None, Some(1e4)] {
            let mut problem = Problem::new(4, 8, 256, dim, dtype).with_band(Band::CAUSAL);
            problem.score.scale = Some(1e6);
            problem.score.softcap = cap;
            for family in Family::of_pass(PassKind::Forward) {
                let plan = family.default_for(&problem, &Arch::SM_90).unwrap();
                programs.push(emit(&problem, &plan, &Arch::SM_90).unwrap());
            }
        }
    }
    let kernels: Vec<Kernel> = programs.iter().map(|program| program.kernel(0)).collect();
    let Some(facts) = tools::facts(&kernels.iter().collect::<Vec<_>>()) else { return };
    for (kernel, facts) in kernels.into_iter().zip(facts) {
        assert_eq!(facts.spills, 0, "{}", kernel.entry);
    }
}

/// The variants of the softmax, at a size where m has units of 8 to 32, and above 2^31.
#[test]
fn every_variant_of_the_softmax_takes_wide_logits() {
    let arch = Arch { multiprocessors: 2, ..Arch::SM_90 };
    let variants = [
        (Rescaling::Always, Sums::Lanes, 0),
        (Rescaling::Beyond(8), Sums::Lanes, 0),
        (Rescaling::Beyond(8), Sums::Product, 0),
        (Rescaling::Speculative { beyond: 8, limit: 15 }, Sums::Lanes, 4),
        (Rescaling::Speculative { beyond: 8, limit: 15 }, Sums::Product, 4),
    ];
    for dtype in [DType::F16, DType::Bf16] {
        for scale in [3e6, 7e6, 1.5e7, 9e15] {
            let mut problem = Problem::new(1, 2, 60, 64, dtype).with_seq_kv(150, Layout::Bhsd);
            problem.score.scale = Some(scale);
            for (rescale, sums, exps_by_fma) in variants {
                let chains = Chains { max: 2, sum: 1 };
                let base = WgmmaPlan::default_for(&problem, &arch);
                let plan = WgmmaPlan { block_n: 32, rescale, sums, exps_by_fma, chains, ..base };
                let plan = Plan::Wgmma(plan);
                if plan.check(&problem, &arch).is_ok() {
                    common::run(&mut Emulator::new(Options::default()), &problem, &plan, &arch, 5).check();
                }
            }
            for rescale in [Rescale::Always, Rescale::Beyond(8)] {
                let base = MmaPlan::default_for(&problem, &arch);
                let plan = Plan::Mma(MmaPlan { block_n: 32, rescale, kv_warps: 1, splits: 1, ..base });
                common::run(&mut Emulator::new(Options::default()), &problem, &plan, &arch, 5).check();
            }
        }
    }
}

/// 8-bit inputs, whose P has little range, without and with descale factors of heads and of blocks of rows.
#[test]
fn eight_bits_take_wide_logits() {
    let base = Problem::new(1, 2, 70, 64, DType::E4m3).with_seq_kv(133, Layout::Bhsd).with_lse(true);
    let scaled = with_factors(base.clone(), [Some(0), Some(0), None]);
    let by_block = with_factors(base.clone(), [Some(64), Some(64), None]);
    for (problem, factors) in [(&base, 1.0), (&scaled, 1.0), (&scaled, 1e-8), (&by_block, 1e-8)] {
        for scale in [2000.0, 3e6, 7e6, 1.5e7, 9e15, -9e15] {
            let mut problem = problem.clone();
            problem.score.scale = Some(scale);
            for family in [Family::Mma, Family::Wgmma] {
                let plan = family.default_for(&problem, &Arch::SM_90).unwrap();
                let run = fp8::run_with_factors(
                    &problem,
                    &plan,
                    &Arch::SM_90,
                    5,
                    |_| {},
                    |scales| {
                        for operand in [Operand::Descale(Tensor::Q), Operand::Descale(Tensor::K)] {
                            scales
                                .get_mut(operand)
                                .into_iter()
                                .flatten()
                                .for_each(|factor| *factor *= factors);
                        }
                    },
                );
                run.check();
            }
        }
    }
}
