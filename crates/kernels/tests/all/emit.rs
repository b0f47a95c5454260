//! Tests of the emitted kernels: golden histograms of instructions, and the output of ptxas and nvdisasm if
//! these tools are available (`cargo xtask test` provides them).

use crate::tools;
use std::collections::BTreeMap;
use std::fmt::Write;

use crate::common::each::each;
use crate::tools::Facts;
use attend::Rescale;
use flashcore_kernels::backward::fused::FusedPlan;
use flashcore_kernels::backward::split::SplitPlan;
use flashcore_kernels::forward::mma::{MmaPlan, QueryHome};
use flashcore_kernels::forward::small;
use flashcore_kernels::forward::wgmma::{Rescaling, WgmmaPlan};
use flashcore_kernels::select::{Device, TunedTable, choose_of};
use flashcore_kernels::{Arch, Family, Plan, emit};
use problem::{Band, DType, Layout, Lengths, Pass, PassKind, Problem, SideLengths, Tensor};
use ptx::{Item, Kernel, Statement};
use tile::CopyMode;

fn default_plan(problem: &Problem, arch: &Arch) -> MmaPlan {
    MmaPlan::default_for(problem, arch)
}

/// Launch, registers and instructions of a kernel, one per line.
fn histogram(kernel: &Kernel) -> String {
    let mut text = String::new();
    let launch = &kernel.launch;
    writeln!(text, "target {} version {}", kernel.module.target, kernel.module.version).unwrap();
    writeln!(text, "grid {:?} block {:?} shared {}", launch.grid, launch.block, launch.dynamic_shared)
        .unwrap();
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    for item in &kernel.module.items {
        let Item::Function(function) = item else { continue };
        let body = function.body.as_ref().unwrap();
        for statement in &body.statements {
            let Statement::Inst(inst) = statement else { continue };
            let line = inst.display(body).to_string();
            let line =
                line.split_once(' ').filter(|(guard, _)| guard.starts_with('@')).map_or(&*line, |p| p.1);
            let mnemonic = line.split([' ', ';']).next().unwrap();
            *counts.entry(mnemonic.to_owned()).or_default() += 1;
        }
    }
    for (mnemonic, count) in counts {
        writeln!(text, "{count:5} {mnemonic}").unwrap();
    }
    text
}

/// Plans of every family that differ in the emitted code.
fn golden_cases() -> Vec<(&'static str, Problem, Plan, Arch)> {
    let mission = Problem::mission();
    let of = |problem: &Problem, arch: Arch| default_plan(problem, &arch);
    let causal = Problem::new(4, 16, 2048, 128, DType::Bf16).with_band(Band::CAUSAL);
    let odd = Problem::new(1, 8, 500, 72, DType::F16);
    let wide = Problem::new(1, 64, 4096, 256, DType::F16);
    let mut unaligned = Problem::new(1, 8, 500, 64, DType::F16);
    unaligned.q.row = 67;
    let bytes = |problem: &Problem| problem.clone().with_dtypes(DType::E4m3.into());
    let (mission8, causal8, wide8) = (bytes(&mission), bytes(&causal), bytes(&wide));
    let simple = MmaPlan { stages: 1, rescale: Rescale::Always, ..of(&mission, Arch::SM_80) };
    let causal_lse = causal.clone().with_lse(true);
    let mma = [
        ("mission", mission.clone(), of(&mission, Arch::SM_90), Arch::SM_90),
        ("mission_one_stage_always", mission.clone(), simple, Arch::SM_80),
        ("causal_d128_lse", causal_lse.clone(), of(&causal_lse, Arch::SM_80), Arch::SM_80),
        ("ragged_d72", odd.clone(), of(&odd, Arch::SM_86), Arch::SM_86),
        ("d256_8_warps", wide.clone(), of(&wide, Arch::SM_80), Arch::SM_80),
        ("unaligned", unaligned.clone(), of(&unaligned, Arch::SM_89), Arch::SM_89),
        ("fp8_mission", mission8.clone(), of(&mission8, Arch::SM_89), Arch::SM_89),
        ("fp8_causal_d128", causal8.clone(), of(&causal8, Arch::SM_89), Arch::SM_89),
        ("fp8_d256", wide8.clone(), of(&wide8, Arch::SM_120), Arch::SM_120),
    ];
    let mma = mma.into_iter().map(|(name, problem, plan, arch)| (name, problem, Plan::Mma(plan), arch));

    let hopper = |name, problem: &Problem, plan| (name, problem.clone(), plan, Arch::SM_90);
    let full = Problem::new(4, 16, 2048, 128, DType::F16);
    let wgmma = |problem: &Problem| WgmmaPlan::default_for(problem, &Arch::SM_90);
    let classic = WgmmaPlan { rescale: Rescaling::Beyond(8), ..wgmma(&full) };
    let small = |problem: &Problem| small::default_for(problem, &Arch::SM_90);
    let short = Problem::new(1, 8, 256, 64, DType::F16);
    let long = Problem::new(1, 8, 4096, 64, DType::F16);
    let families = [&short, &long].map(|problem| small(problem).family());
    assert_eq!(families, ["small_at_once", "small_streamed"]);
    let deepseek = Problem { head_dim_v: 128, ..Problem::new(2, 8, 500, 192, DType::F16) };
    let backward = [
        ("backward_causal_d128", causal.clone(), Arch::SM_90),
        ("backward_ragged_d192", deepseek.with_layout(Layout::Bshd), Arch::SM_80),
        ("backward_d256", wide.clone(), Arch::SM_120),
    ];
    let fused = [("backward_fused_causal_d128", &causal), ("backward_fused_d64", &long)];
    let fused = fused.map(|(name, problem)| {
        let problem = problem.clone().with_pass(Pass::BACKWARD);
        let plan = FusedPlan::default_for(&problem, &Arch::SM_90);
        (name, problem, Plan::from(plan), Arch::SM_90)
    });
    let backward = backward.into_iter().map(|(name, problem, arch)| {
        let problem = problem.with_pass(Pass::DETERMINISTIC);
        let plan = SplitPlan::default_for(&problem, &arch);
        (name, problem, Plan::from(plan), arch)
    });
    mma.chain(backward)
        .chain(fused)
        .chain([
            hopper("wgmma_d128", &full, Plan::Wgmma(wgmma(&full))),
            hopper("wgmma_d128_lazy", &full, Plan::Wgmma(classic)),
            hopper("wgmma_causal_d128_lse", &causal_lse, Plan::Wgmma(wgmma(&causal_lse))),
            hopper("small_at_once", &short, small(&short)),
            hopper("small_mission", &mission, small(&mission)),
            hopper("small_streamed_lse", &long.clone().with_lse(true), small(&long)),
        ])
        .collect()
}

/// `FLASHCORE_BLESS=1 cargo test -p flashcore-kernels --test all emit::` rewrites the goldens. Review the
/// diff.
#[test]
fn histograms_are_the_golden_ones() {
    let folder = filetest::root().join("emit");
    let compared = golden_cases().into_iter().map(|(name, problem, plan, arch)| {
        let kernel = emit(&problem, &plan, &arch).unwrap_or_else(|error| panic!("{name}: {error}")).kernel(0);
        filetest::golden(&folder.join(format!("{name}.txt")), &histogram(&kernel))
    });
    let different: Vec<String> = compared.filter_map(Result::err).collect();
    assert!(different.is_empty(), "{}", different.join("\n"));
}

/// Default plans for grids that fill a device, and for small grids, whose tiles have fewer rows.
#[test]
fn defaults_assemble_without_spills() {
    let dims = [32, 40, 64, 72, 96, 120, 128, 136, 192, 256, 264, 320, 384, 512];
    let mut cases: Vec<(Problem, MmaPlan, Arch)> = Vec::new();
    for (dim, mask) in dims.into_iter().flat_map(|dim| [Band::FULL, Band::CAUSAL].map(|mask| (dim, mask))) {
        let dtype = if dim % 16 == 0 { DType::F16 } else { DType::Bf16 };
        for arch in Arch::ALL {
            for problem in [Problem::new(8, 32, 2048, dim, dtype), Problem::new(1, 8, 256, dim, dtype)] {
                let problem = problem.with_band(mask);
                let plan = default_plan(&problem, &arch);
                // Grids with identical tiles get identical code.
                let same = |(p, known, a): &(Problem, MmaPlan, Arch)| {
                    (p.head_dim, p.band) == (dim, mask) && *known == plan && *a == arch
                };
                if !cases.iter().any(same) {
                    cases.push((problem, plan, arch));
                }
            }
        }
    }
    assert!(cases.iter().any(|(_, plan, _)| plan.kv_warps == 4), "no small grid");
    none_spills(cases.into_iter().map(|(problem, plan, arch)| (problem, Plan::Mma(plan), arch)).collect());
}

fn none_spills(cases: Vec<(Problem, Plan, Arch)>) {
    let kernels = each(&cases, |(problem, plan, arch)| emit(problem, plan, arch).unwrap().kernel(0));
    let Some(facts) = tools::facts(&kernels.iter().collect::<Vec<_>>()) else { return };
    for ((problem, plan, arch), Facts { registers, spills, .. }) in cases.into_iter().zip(facts) {
        assert_eq!(spills, 0, "{problem:?} {plan:?} sm_{}: {registers} registers", arch.sm);
    }
}

#[test]
fn kernels_of_packed_batches_assemble_without_spills() {
    let mut cases = Vec::new();
    for (family, arch) in [(Family::Mma, Arch::SM_80), (Family::Wgmma, Arch::SM_90)] {
        for (dim, band) in [(64, Band::CAUSAL), (128, Band::FULL), (128, Band::CAUSAL)] {
            let mut problem = Problem::new(16, 32, 2048, dim, DType::Bf16).with_layout(Layout::Bshd);
            let packed = SideLengths { packed: Some(8192), used: false };
            problem.lengths = Lengths { q: packed, kv: packed, left_padded: false };
            let problem = problem.with_band(band);
            let plan = family.default_for(&problem, &arch).unwrap();
            cases.push((problem, plan, arch));
        }
    }
    none_spills(cases);
}

/// The characteristic instructions of the family appear in the machine code as often as they were emitted.
#[test]
fn machine_code_holds_tensor_cores_matrix_loads_and_asynchronous_copies() {
    let (Some(ptxas), Some(nvdisasm)) = (tools::find("FLASHCORE_PTXAS"), tools::find("FLASHCORE_NVDISASM"))
    else {
        return;
    };
    for arch in Arch::ALL {
        let problem = Problem::new(8, 32, 2048, 64, DType::F16);
        let kernel = emit(&problem, &Plan::Mma(default_plan(&problem, &arch)), &arch).unwrap().kernel(0);
        let text = kernel.module.to_string();
        let sass = tools::disassemble(&nvdisasm, &tools::assemble(&ptxas, &kernel));
        for (ptx, machine) in [("mma.sync", "HMMA"), ("ldmatrix", "LDSM"), ("cp.async.cg", "LDGSTS")] {
            let (emitted, found) = (text.matches(ptx).count(), sass.matches(machine).count());
            assert!(found >= emitted && emitted > 0, "sm_{}: {emitted} {ptx}, {found} {machine}", arch.sm);
        }
    }
}

#[test]
fn plans_that_cannot_work_are_refused_with_the_reason() {
    let problem = Problem::mission();
    let good = default_plan(&problem, &Arch::SM_80);
    let reason = |plan: MmaPlan, problem: &Problem, arch: &Arch| {
        Plan::Mma(plan).check(problem, arch).expect_err("refused").to_string()
    };
    let of = |change: fn(&mut MmaPlan)| {
        let mut plan = good.clone();
        change(&mut plan);
        reason(plan, &Problem::mission(), &Arch::SM_80)
    };
    assert!(
        of(|p| p.block_m = 40)
            .starts_with("invalid value '40' for block_m: expected multiples of 16 · warps")
    );
    assert!(of(|p| p.block_n = 0).starts_with("invalid value '0' for block_n:"));
    assert!(of(|p| p.warps = 0).starts_with("invalid value '0' for warps: expected 1 to 16"));
    assert!(of(|p| p.stages = 0).starts_with("invalid value '0' for stages:"));
    assert!(of(|p| p.resident_ctas = Some(0)).starts_with("invalid value '0' for resident_ctas:"));
    assert!(of(|p| p.resident_ctas = Some(3)).starts_with("73728 bytes of shared memory"));
    let beyond_f16 = of(|p| p.rescale = Rescale::Beyond(9));
    assert_eq!(beyond_f16, "invalid value '9' for rescale.beyond: expected 0 to 8 in f16");
    assert!(
        of(|p| (p.block_m, p.block_n) = (256, 256))
            .contains("registers per thread are needed, but 255 are available")
    );
    let wide = Problem::new(1, 8, 512, 256, DType::F16);
    let needs = MmaPlan { block_n: 64, stages: 2, queries: QueryHome::Shared, ..good.clone() };
    assert_eq!(
        reason(needs, &wide, &Arch::SM_89),
        "163840 bytes of shared memory are needed, but a CTA of this plan can have 101376 on sm_89; use smaller tiles, fewer stages or fewer resident CTAs"
    );
    let mut unaligned = Problem::mission();
    unaligned.k.row = 68;
    assert_eq!(
        reason(MmaPlan { copy: CopyMode::Async16, ..good.clone() }, &unaligned, &Arch::SM_80),
        "invalid value '68' for row stride of k: expected a multiple of 8 elements, as copies of that width need, \
         or copy = elements"
    );
    let fp8 = Problem::new(1, 8, 512, 64, DType::E4m3);
    assert_eq!(
        reason(good.clone(), &fp8, &Arch::SM_80),
        "invalid value '80' for sm: expected 89 and later with 8-bit inputs"
    );
    let dim = Problem::new(1, 8, 512, 577, DType::F16);
    assert!(
        reason(good, &dim, &Arch::SM_80).starts_with("invalid value '577' for head_dim: expected 1 to 576")
    );
}

#[test]
fn plans_survive_serde() {
    let problem = Problem::mission().with_seq_kv(100, Layout::Bhsd);
    let plan = Plan::Mma(default_plan(&problem, &Arch::SM_89));
    let json = serde_json::to_string(&plan).unwrap();
    assert_eq!(serde_json::from_str::<Plan>(&json).unwrap(), plan, "{json}");
}

/// The kernels of the original log were plans in older files.
#[test]
fn a_plan_of_the_former_ladder_is_refused_by_name() {
    let error =
        serde_json::from_str::<Plan>(r#"{"family":"ladder","rung":"phase4"}"#).unwrap_err().to_string();
    let expected = "invalid value 'ladder' for family: expected one of mma, wgmma, small_streamed, small_at_once, \
         backward_split, backward_fused; ";
    assert!(error.starts_with(expected) && error.contains("'phase4'"), "{error}");
}

#[test]
fn buffers_and_arguments_follow_the_strides() {
    let mut problem = Problem::mission();
    problem.k.row = -64;
    problem.out.row = 72;
    problem.out.head = 512 * 72;
    let problem = problem.with_lse(true);
    let plan = default_plan(&problem, &Arch::SM_80);
    let kernel = emit(&problem, &Plan::Mma(plan), &Arch::SM_80).unwrap().kernel(0);
    let dense = 8 * 512 * 64 * 2;
    let sizes: Vec<(&str, usize)> = kernel.buffers.iter().map(|b| (b.name.as_str(), b.bytes)).collect();
    let out = 8 * 512 * 72 * 2 - 16;
    assert_eq!(sizes, [("q", dense), ("k", dense), ("v", dense), ("out", out), ("lse", 8 * 512 * 4)]);
    assert_eq!(kernel.args[1], ptx::Arg::Buffer { index: 1, offset: 511 * 64 * 2 });
    let params: Vec<u32> =
        kernel.module.function(&kernel.entry).unwrap().params.iter().map(|p| p.bytes()).collect();
    assert_eq!(params, kernel.args.iter().map(|a| a.bytes()).collect::<Vec<_>>());
}

/// With at least as many keys as rows, a top-left mask gives the same plan and the same kernel as the square
/// mask aligned to the bottom right. With more rows than keys, the kernel differs.
#[test]
fn alignments_that_are_one_are_one_kernel() {
    let device = Device { name: "NVIDIA H200", arch: Arch::SM_90 };
    let of = |mask, seq_q, seq_kv, dim| {
        let problem = Problem::new(2, 8, seq_q, dim, DType::Bf16).with_band(mask);
        problem.with_seq_kv(seq_kv, Layout::Bshd)
    };
    for family in Family::of_pass(PassKind::Forward) {
        // CTAs of `small_at_once` hold only few keys at once.
        let (long, few) = if family == Family::SmallAtOnce { (250, 100) } else { (1000, 300) };
        for (seq, dim) in [(512, 64), (long, 128)] {
            let plan =
                |problem: &Problem| choose_of(family, problem, &device, TunedTable::builtin()).unwrap().plan;
            let text = |problem: &Problem| emit(problem, &plan(problem), &Arch::SM_90).unwrap().kernel(0);
            let square = of(Band::CAUSAL, seq, seq, dim);
            for seq_kv in [seq, seq + 300] {
                let same = of(Band::CAUSAL_TOP_LEFT, seq, seq_kv, dim);
                assert_eq!(plan(&same), plan(&square), "{}", family.name());
                let (kernel, of_square) = (text(&same), text(&square));
                assert_eq!(kernel.module.to_string(), of_square.module.to_string(), "{}", family.name());
                assert_eq!(kernel.launch, of_square.launch);
                // The buffers keep the size of the caller's tensors.
                let bytes = |tensor| 2 * same.span(tensor).unwrap().0;
                assert_eq!([1, 2].map(|i| kernel.buffers[i].bytes), [Tensor::K, Tensor::V].map(bytes));
            }
            let (fewer, rectangle) =
                (of(Band::CAUSAL_TOP_LEFT, seq, few, dim), of(Band::CAUSAL, seq, few, dim));
            let kernels = [&fewer, &rectangle]
                .map(|problem| emit(problem, &plan(&fewer), &Arch::SM_90).unwrap().kernel(0));
            assert_ne!(kernels[0].module.to_string(), kernels[1].module.to_string(), "{}", family.name());
        }
    }
}
