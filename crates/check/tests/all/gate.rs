//! Tests of the gate on kernels of the fused family: right kernels pass on every torture problem, and every
//! inserted fault is rejected.

use crate::common::small_tiles;
use attend::{Rescale, Sums};
use emu::Schedule;
use flashcore_check::gate::mutate::{Fault, mutant, sites};
use flashcore_check::gate::{CheckReport, Settings, Verdict, check_family, check_kernel, torture};
use flashcore_check::launchfile::Bound;
use judge::inputs::Style;
use kernels::forward::mma::{MmaPlan, QueryHome};
use kernels::forward::small::{AtOncePlan, Merge, StreamedPlan};
use kernels::forward::wgmma::{Ends, Rescaling, WgmmaPlan};
use kernels::{Arch, Family, Plan};
use problem::{Band, DType, Layout, Problem};
use ptx::{Imm, Item, Kernel, Op, Operand, Statement, TernaryOp, Type};
use tile::{Handout, RowStore, Tail, Turns};

fn fused(problem: &Problem) -> Bound {
    let arch = Arch::SM_80;
    let problem = &problem.clone().with_lse(true);
    let plan = Plan::default_for(problem, &arch).unwrap();
    Bound::of_program(kernels::emit(problem, &plan, &arch).unwrap(), problem)
}

fn show(check: &CheckReport) -> String {
    format!("{}: {:#?}", check.verdict, check.reasons)
}

#[test]
fn the_fused_family_passes_the_torture_set() {
    for dtype in [DType::F16, DType::Bf16] {
        let problems = torture::problems(dtype, 64);
        let check = check_family(&problems, &Settings::quick(), |p| Some(fused(p))).unwrap();
        assert_eq!(check.verdict, Verdict::Passed, "{dtype} {}", show(&check));
    }
}

#[test]
fn the_fused_kernel_is_proven_on_every_style() {
    let problem = Problem::new(1, 2, 150, 64, DType::F16).with_band(Band::CAUSAL);
    let check = check_kernel(&fused(&problem), &Settings::thorough()).unwrap();
    assert_eq!(check.verdict, Verdict::Passed, "{}", show(&check));
    assert_eq!(check.runs as usize, Settings::thorough().runs.len());
}

/// CTAs that share tiles: the scratch starts uninitialised, and the result does not depend on which CTA
/// merges.
#[test]
fn tiles_that_ctas_share_pass() {
    let (problem, arch) =
        (Problem::new(1, 3, 150, 64, DType::Bf16), Arch { multiprocessors: 4, ..Arch::SM_90 });
    let plan = WgmmaPlan {
        consumers: 2,
        block_n: 32,
        turns: Turns::Free,
        ends: Ends::Common,
        handout: Handout::Static,
        tail: Tail::Shared,
        ..WgmmaPlan::default_for(&problem, &arch)
    };
    let step = kernels::emit(&problem, &Plan::Wgmma(plan), &arch).unwrap();
    let check = check_kernel(&Bound::of_program(step, &problem), &Settings::thorough()).unwrap();
    assert_eq!(check.verdict, Verdict::Passed, "{}", show(&check));
}

/// Causal problems with several key blocks and tails that end in each of a tile's four quarters of 16 rows (a
/// bound that is off by one in one quarter shows only where a tail ends there), and one whose first CTAs see
/// no key.
fn with_tails(queries: QueryHome, stages: u32) -> Vec<Bound> {
    [(146, 201), (170, 217), (189, 239), (135, 249), (192, 256), (192, 64)]
        .into_iter()
        .map(|(seq_q, seq_kv)| {
            let problem = Problem::new(1, 1, seq_q, 64, DType::F16).with_seq_kv(seq_kv, Layout::Bhsd);
            small_tiles(&problem.with_band(Band::CAUSAL), queries, stages)
        })
        .collect()
}

/// The reason of the first problem on which the fault is rejected; `None` when all pass.
fn refusal(problems: &[Bound], fault: Fault, site: usize) -> Option<String> {
    problems.iter().find_map(|right| {
        let kernel = mutant(&right.kernel, fault, site)?;
        match check_kernel(&Bound { kernel, ..right.clone() }, &Settings::quick()) {
            Ok(check) => (check.verdict == Verdict::Failed).then(|| check.reasons.join("; ")),
            Err(error) => Some(error.to_string()),
        }
    })
}

/// Inserts a fault at every `step`-th site. Each must be rejected for one of the reasons.
fn refuse(problems: &[Bound], fault: Fault, reasons: &[&str], step: usize) {
    let sites = sites(&problems[0].kernel, fault);
    for site in (0..sites).step_by(step) {
        let refusal = refusal(problems, fault, site).unwrap_or_else(|| panic!("{fault:?} {site} passes"));
        assert!(reasons.iter().any(|r| refusal.contains(r)), "{fault:?} {site}: {refusal}");
    }
}

/// All synchronisation sites, for every placement that the plan supports.
#[test]
fn every_dropped_synchronisation_is_refused() {
    for queries in [QueryHome::Registers, QueryHome::Shared] {
        for stages in [1, 2, 3] {
            let problems = with_tails(queries, stages);
            refuse(&problems, Fault::DropBarrier, &["race at", "warp_order at", "async_not_waited at"], 1);
            refuse(&problems, Fault::DropWarpBarrier, &["race at", "warp_order at"], 1);
            refuse(&problems, Fault::DropAsyncWait, &["async_not_waited at"], 1);
        }
    }
}

#[test]
fn every_other_fault_is_refused_for_its_reason() {
    let problems = with_tails(QueryHome::Registers, 2);
    let edge = ["out_of_bounds at", "unwritten_output at", "uninitialised_read at", "wrong answer"];
    for (fault, reasons, step) in [
        (Fault::DropCopy, &["uninitialised_read at", "wrong answer"][..], 3),
        (Fault::BoundTooLarge, &edge, 7),
        (Fault::ComparisonOffByOne, &edge, 7),
        // There is one site per element of a tile, and all are alike.
        (Fault::SkipRescale, &["wrong answer"], 11),
        (Fault::WrongScale, &["wrong answer"], 1),
        (Fault::SkipStore, &["unwritten_output at"], 1),
    ] {
        refuse(&problems, fault, reasons, step);
    }
}

/// Weights that are small individually but large in total must not be rounded away, whether the maximum comes
/// first or last.
#[test]
fn what_is_left_beside_one_heavy_key_counts() {
    for dtype in [DType::F16, DType::Bf16] {
        for family in [Family::Wgmma, Family::SmallStreamed, Family::Mma] {
            let problem = Problem::new(1, 1, 64, 64, dtype).with_seq_kv(400, Layout::Bhsd);
            let plan = family.default_for(&problem, &Arch::SM_90).unwrap();
            let step = kernels::emit(&problem, &plan, &Arch::SM_90).unwrap();
            let runs = vec![(Style::Spike, 1, Schedule::Late)];
            let settings = Settings { runs, ..Settings::quick() };
            let check = check_kernel(&Bound::of_program(step, &problem), &settings).unwrap();
            assert_eq!(check.verdict, Verdict::Passed, "{dtype} {plan:?} {}", show(&check));
        }
    }
}

/// Kernels of all families in a 16-bit type, with each kind of softmax, on few rows and many keys.
fn of_each_softmax(dtype: DType) -> Vec<Bound> {
    let problem = Problem::new(1, 1, 64, 64, dtype).with_seq_kv(KEYS, Layout::Bhsd).with_lse(true);
    let arch = Arch::SM_90;
    let wgmma = WgmmaPlan::default_for(&problem, &arch);
    let guessing = Rescaling::Speculative { beyond: 8, limit: 15 };
    let streamed = StreamedPlan::default_for(&problem, &arch);
    let at_once = AtOncePlan {
        cluster: 4,
        kv_warpgroups: 2,
        row_warpgroups: 1,
        block_n: 256,
        softmax_steps: 2,
        qk_pieces: 2,
        key_copies: 1,
        pv_pieces: 1,
        merge: Merge::Shares,
        store: RowStore::Pairs,
        ..AtOncePlan::default_for(&problem, &arch)
    };
    let mma = MmaPlan::default_for(&problem, &arch);
    let mut plans = vec![
        Plan::SmallAtOnce(at_once),
        Plan::SmallStreamed(StreamedPlan { speculative: Some(15), ..streamed.clone() }),
        Plan::SmallStreamed(StreamedPlan { speculative: None, rescale: Rescale::Always, ..streamed }),
        Plan::Mma(MmaPlan { rescale: Rescale::Always, ..mma.clone() }),
        Plan::Mma(mma),
    ];
    plans.extend(
        [Rescaling::Always, Rescaling::Beyond(8), guessing]
            .map(|rescale| Plan::Wgmma(WgmmaPlan { rescale, sums: Sums::Lanes, ..wgmma.clone() })),
    );
    let bind = |plan: &Plan| {
        let step = kernels::emit(&problem, plan, &arch).unwrap_or_else(|e| panic!("{plan:?}: {e}"));
        Bound::of_program(step, &problem)
    };
    plans.iter().map(bind).collect()
}

/// Enough keys that the roundings of small weights to a few bits average out.
const KEYS: usize = 2048;

/// A verdict on one style of light keys.
fn on_light_keys(bound: &Bound, style: Style) -> CheckReport {
    let runs = vec![(style, 1, Schedule::Late)];
    check_kernel(bound, &Settings { runs, ..Settings::quick() }).unwrap()
}

/// Keys whose weight is so small that f16 cannot add it to 1 still count.
#[test]
fn keys_lighter_than_f16_holds_count() {
    for dtype in [DType::F16, DType::Bf16] {
        for bound in of_each_softmax(dtype) {
            for style in Style::LIGHT {
                let check = on_light_keys(&bound, style);
                assert_eq!(check.verdict, Verdict::Passed, "{dtype} {} {}", bound.kernel.entry, show(&check));
            }
        }
    }
}

/// Such keys are lost if the references are the maxima themselves.
#[test]
fn without_room_below_f16_loses_light_keys() {
    for mut bound in of_each_softmax(DType::F16) {
        bound.kernel = with_references_at_maxima(&bound.kernel);
        for style in Style::LIGHT {
            let check = on_light_keys(&bound, style);
            assert_eq!(check.verdict, Verdict::Failed, "{} {style:?}", bound.kernel.entry);
            assert!(check.reasons[0].starts_with("wrong answer on keys 2^"), "{}", show(&check));
        }
    }
}

/// The kernel with its references at the maxima, instead of 7 powers of two below them.
fn with_references_at_maxima(kernel: &Kernel) -> Kernel {
    let mut module = kernel.module.clone().into_module();
    let functions = module.items.iter_mut().filter_map(|item| match item {
        Item::Function(function) => function.body.as_mut(),
        Item::Variable(_) => None,
    });
    let mut raised = 0;
    for statement in functions.flat_map(|body| &mut body.statements) {
        if let Statement::Inst(inst) = statement
            && matches!(inst.op, Op::Ternary(TernaryOp::Fma, Type::F32, _))
            && inst.operands[3] == Operand::Imm(Imm::F32((-7f32).to_bits()))
        {
            inst.operands[3] = Operand::Imm(Imm::F32(0));
            raised += 1;
        }
    }
    assert!(raised > 0, "{} has no such reference", kernel.entry);
    Kernel { module: module.verify().unwrap(), ..kernel.clone() }
}

/// One large element in Q, K or V does not change other rows.
#[test]
fn one_large_element_costs_the_others_nothing() {
    for dtype in [DType::F16, DType::Bf16] {
        for family in [Family::Wgmma, Family::SmallStreamed, Family::Mma] {
            let problem = Problem::new(1, 1, 96, 64, dtype).with_band(Band::CAUSAL);
            let plan = family.default_for(&problem, &Arch::SM_90).unwrap();
            let step = kernels::emit(&problem, &plan, &Arch::SM_90).unwrap();
            // Consecutive seeds put the element into different tensors.
            let runs = (3..9).map(|seed| (Style::Outlier, seed, Schedule::Late)).collect();
            let settings = Settings { runs, ..Settings::quick() };
            let check = check_kernel(&Bound::of_program(step, &problem), &settings).unwrap();
            assert_eq!(check.verdict, Verdict::Passed, "{dtype} {plan:?} {}", show(&check));
        }
    }
}
