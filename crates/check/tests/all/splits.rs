//! Tests of the gate on forward passes with keys divided among CTAs: the kernel of partial results and the
//! merge pass together, and a fault in either kernel is rejected.

use crate::common::{half_of_torture_passes, in_rows, passes, plain_mma};
use attend::Order;
use emu::{Emulator, Options, Schedule};
use flashcore_check::gate::mutate::{Fault, mutant, sites};
use flashcore_check::gate::{Feed, Settings, Verdict, bind, check_kernel, torture, trial};
use flashcore_check::launchfile::{Bound, Role};
use flashcore_check::{forecast, study};
use judge::inputs::Style;
use kernels::forward::mma::{Grid, MmaPlan, QueryHome};
use kernels::select::{self, TunedTable};
use kernels::{Arch, KernelError, Plan};
use predict::machine::A100;
use problem::{Band, Corner, DType, Layout, Problem};
use ptx::{BinaryOp, Imm, Instruction, Item, Kernel, Op, Operand, Statement, Type, UnaryOp};
use tile::CopyMode;

/// Plans with every place of the queries, order of products, order of tiles and kind of copy.
fn plans() -> [MmaPlan; 4] {
    let base = MmaPlan {
        block_n: 32,
        splits: 3,
        products: Order::InTurn,
        queries: QueryHome::Registers,
        tile_order: Grid::RowsFirst,
        ..plain_mma(&Problem::mission(), &Arch::SM_80)
    };
    [
        base.clone(),
        MmaPlan {
            queries: QueryHome::Shared,
            stages: 1,
            splits: 2,
            tile_order: Grid::HeadsFirst,
            ..base.clone()
        },
        MmaPlan {
            products: Order::ScoresAhead,
            kv_warps: 2,
            block_m: 16,
            splits: 5,
            stages: 3,
            ..base.clone()
        },
        MmaPlan {
            queries: QueryHome::Shared,
            copy: CopyMode::Elements,
            warps: 1,
            block_m: 16,
            splits: 7,
            ..base
        },
    ]
}

fn emitted(plan: &MmaPlan, problem: &Problem) -> Result<Bound, KernelError> {
    bind(&Plan::Mma(plan.clone()), &problem.clone().with_lse(true), &Arch::SM_80)
}

fn split(plan: &MmaPlan, problem: &Problem) -> Bound {
    emitted(plan, problem).unwrap()
}

#[test]
fn every_plan_passes_the_torture_set() {
    for (i, plan) in plans().iter().enumerate() {
        let problems = in_rows(torture::problems([DType::F16, DType::Bf16][i % 2], 64));
        // Splits do not support uneven query lengths. This test covers uneven key lengths, sinks and
        // programs. Both types have both halves of the runs.
        half_of_torture_passes(&problems, i / 2, 31, plan, |problem| {
            problem.lengths.q.is_even().then(|| split(plan, problem))
        });
    }
}

/// Windows, softcaps, grouped heads, head dims that are not a power of two, and lengths that no block
/// divides: with more splits than blocks, and with splits in which some rows see no key.
#[test]
fn bands_and_scores_pass_on_ragged_shapes() {
    let window = |before, after| Band { before: Some(before), after, corner: Corner::BottomRight };
    let bands = [
        Band::FULL,
        Band::CAUSAL,
        Band::CAUSAL_TOP_LEFT,
        window(40, Some(0)),
        window(5, Some(9)),
        window(70, None),
    ];
    let shapes = [(1, 300, 64), (3, 203, 80), (67, 131, 64), (70, 33, 48), (5, 31, 64), (2, 1, 128)];
    for (i, band) in bands.into_iter().enumerate() {
        for (j, (rows, keys, dim)) in shapes.into_iter().enumerate() {
            let mut problem = Problem::new(2, 4, rows, dim, [DType::F16, DType::Bf16][(i + j) % 2]);
            problem.heads_kv = 2;
            let problem = problem.with_seq_kv(keys, Layout::Bshd).with_band(band);
            let problem = if j % 2 == 0 { problem.with_softcap(5.0) } else { problem };
            let plan = &plans()[(i + j) % 4];
            passes(&check_kernel(&split(plan, &problem), &Settings::quick()).unwrap(), &(problem, plan));
        }
    }
}

#[test]
fn every_style_passes_under_every_schedule() {
    let problem = Problem::new(1, 1, 3, 64, DType::F16).with_seq_kv(150, Layout::Bhsd);
    for plan in plans() {
        let check = check_kernel(&split(&plan, &problem), &Settings::thorough()).unwrap();
        passes(&check, &plan);
        let traced: Vec<bool> = check.recorded.iter().map(|record| !record.traces.is_empty()).collect();
        assert_eq!(traced, [true, true]);
    }
}

/// The splits are merged in their order, whichever CTA ends first.
#[test]
fn results_are_bitwise_equal_under_every_schedule() {
    let problem = Problem::new(1, 2, 20, 64, DType::F16).with_seq_kv(210, Layout::Bhsd);
    for plan in plans() {
        let bound = split(&plan, &problem);
        let feed = Feed::draw(&bound, Style::Normal, 5).unwrap();
        let outputs = [Schedule::Late, Schedule::Early, Schedule::Random].map(|schedule| {
            let mut machine = Emulator::new(Options { schedule, seed: 3, ..Options::default() });
            trial(&mut machine, &bound, &feed, None).unwrap().outputs(&bound)
        });
        assert!(outputs.iter().all(|output| *output == outputs[0]), "{plan:?}");
    }
}

/// Keys are divided if rows are few and keys are many, and in no other case.
#[test]
fn defaults_divide_the_keys_of_few_rows() {
    let splits = |heads, rows, keys, arch: &Arch| {
        let problem = Problem::new(1, heads, rows, 128, DType::F16).with_seq_kv(keys, Layout::Bhsd);
        MmaPlan::default_for(&problem.canonical(), arch).splits
    };
    for (arch, expected) in [(Arch::SM_80, 13), (Arch::SM_90, 16)] {
        assert_eq!(splits(8, 1, 65_536, &arch), expected);
        assert_eq!(splits(8, 1, 1024, &arch), 4, "256 keys a split");
        assert_eq!(splits(1, 1, 65_536, &arch), 32, "the most");
        assert_eq!(splits(8, 1, 300, &arch), 1, "few keys");
        assert_eq!(splits(64, 1, 65_536, &arch), 1, "many heads");
        assert_eq!(splits(8, 4096, 4096, &arch), 1, "many rows");
    }
    // Only the keys that the rows see count.
    let window = Band { before: Some(100), after: Some(0), corner: Corner::BottomRight };
    let problem = Problem::new(1, 8, 1, 128, DType::F16).with_seq_kv(65_536, Layout::Bhsd).with_band(window);
    assert_eq!(MmaPlan::default_for(&problem.canonical(), &Arch::SM_80).splits, 1);
    let device = select::Device { name: "unknown", arch: Arch::SM_80 };
    let problem = problem.with_band(Band::FULL);
    let choice = select::choose(&problem, &device, &TunedTable::default()).unwrap();
    assert!(choice.why.last().unwrap().contains("over 13 CTAs"), "{:?}", choice.why);
}

/// The time of a program is the sum of its kernels' times, and the findings are those of both.
#[test]
fn a_forecast_covers_both_kernels() {
    let problem = Problem::new(1, 8, 1, 64, DType::F16).with_seq_kv(1024, Layout::Bhsd);
    let forecast = |splits| {
        let arch = Arch::SM_80;
        let plan = Plan::Mma(MmaPlan { splits, ..MmaPlan::default_for(&problem, &arch) });
        let bound = bind(&plan, &problem, &arch).unwrap();
        let resources = forecast::resources(&bound, None).unwrap();
        forecast::of_kernel(&plan, &problem, &bound, &resources, &A100, &arch, 1).unwrap()
    };
    let (whole, split) = (forecast(1), forecast(4));
    let us: Vec<f64> = split.steps.iter().map(|step| step.us).collect();
    assert_eq!((whole.steps.len(), us.len()), (1, 2));
    assert!((split.prediction.us - us.iter().sum::<f64>()).abs() < 1e-9 && us.iter().all(|&us| us > 0.0));
    assert!(split.prediction.us < whole.prediction.us, "{us:?} {}", whole.prediction.us);
    let shares: f64 = split.prediction.split.iter().map(|(_, share)| share).sum();
    assert!((shares - 1.0).abs() < 1e-6, "{shares}");
    let lines = study::diagnose_steps(&split.bound, &split.recorded, &split.steps, &[], None).lines;
    let merge = split.bound.then[0].module.function("flash_forward_merge").unwrap();
    let first = merge.body.iter().flat_map(|body| &body.statements).find_map(instruction).unwrap().line;
    assert!(lines.iter().any(|cost| cost.line >= first) && lines.iter().any(|cost| cost.line < first));
}

#[test]
fn kernels_share_their_buffers() {
    let bound = split(&plans()[0], &Problem::new(1, 1, 20, 64, DType::F16));
    let [first, merge] = &bound.steps().collect::<Vec<_>>()[..] else { panic!("two kernels") };
    let names = |kernel: &Kernel| kernel.buffers.iter().map(|b| b.name.clone()).collect::<Vec<_>>();
    assert_eq!(names(first), ["q", "k", "v", "partial_out", "partial_statistics", "out", "lse"]);
    assert_eq!(names(first), names(merge));
    let used = |kernel: &Kernel| (0..7).map(|index| kernel.uses(index)).collect::<Vec<_>>();
    assert_eq!(used(first), [true, true, true, true, true, false, false]);
    assert_eq!(used(merge), [false, false, false, true, true, true, true]);
    assert_eq!(bound.roles[3], Role::Internal(kernels::BufferKind::Temporary("partial_out")));
    assert_eq!(bound.launch_file(), None);
}

/// The kernel with `edit` applied to its instructions. `edit` returns whether it changed anything.
fn edited(kernel: &Kernel, mut edit: impl FnMut(&mut [Instruction], usize) -> bool) -> Kernel {
    let mut module = kernel.module.clone().into_module();
    let entry = module.items.iter_mut().find_map(|item| match item {
        Item::Function(f) if *f.name == *kernel.entry => f.body.as_mut(),
        Item::Function(_) | Item::Variable(_) => None,
    });
    let statements = &mut entry.unwrap().statements;
    let mut instructions: Vec<Instruction> = statements.iter().filter_map(instruction).cloned().collect();
    let count = (0..instructions.len()).filter(|&at| edit(&mut instructions, at)).count();
    assert!(count > 0, "the edit finds no instruction in {}", kernel.entry);
    let mut changed = instructions.into_iter();
    for statement in statements.iter_mut().filter(|statement| instruction(statement).is_some()) {
        *statement = Statement::Inst(changed.next().unwrap());
    }
    Kernel { module: module.verify().unwrap(), ..kernel.clone() }
}

fn instruction(statement: &Statement) -> Option<&Instruction> {
    match statement {
        Statement::Inst(inst) => Some(inst),
        Statement::Label(_) | Statement::Pragma(_) => None,
    }
}

/// Gives the weight of a split a constant instead.
fn weigh(inst: &mut Instruction, weight: f32) -> bool {
    let is_weight = matches!(inst.op, Op::Unary(UnaryOp::Ex2, Type::F32, _));
    if is_weight {
        inst.op = Op::Mov(Type::F32);
        inst.operands[1] = Operand::Imm(Imm::F32(weight.to_bits()));
    }
    is_weight
}

fn reasons(bound: &Bound) -> String {
    let check = check_kernel(bound, &Settings::quick()).unwrap();
    assert_eq!(check.verdict, Verdict::Failed);
    check.reasons.join("; ")
}

/// 4 blocks of 32 keys for 3 splits: 2, 2 and none.
fn three_splits() -> Bound {
    let problem = Problem::new(1, 1, 20, 64, DType::F16).with_seq_kv(120, Layout::Bhsd);
    split(&plans()[0], &problem)
}

#[test]
fn a_merge_that_drops_a_split_is_refused() {
    for dropped in 0..2 {
        let right = three_splits();
        let mut seen = 0;
        let merge = edited(&right.then[0], |all, at| {
            let is_weight = matches!(all[at].op, Op::Unary(UnaryOp::Ex2, ..));
            seen += usize::from(is_weight);
            is_weight && seen == dropped + 1 && weigh(&mut all[at], 0.0)
        });
        let said = reasons(&Bound { then: vec![merge], ..right });
        assert!(said.contains("wrong answer"), "{said}");
    }
}

#[test]
fn weights_that_are_not_rescaled_are_refused() {
    let right = three_splits();
    let merge = edited(&right.then[0], |all, at| weigh(&mut all[at], 1.0));
    let said = reasons(&Bound { then: vec![merge], ..right });
    assert!(said.contains("wrong answer"), "{said}");
}

/// The length of a split is rounded down instead of up, so the last block belongs to no split.
#[test]
fn a_boundary_of_splits_that_is_off_by_one_is_refused() {
    let right = three_splits();
    let two = Operand::Imm(Imm::Int(2));
    let kernel = edited(&right.kernel, |all, at| {
        let after_max = at > 0 && matches!(all[at - 1].op, Op::Binary(BinaryOp::Max, ..));
        let rounds_up = after_max && matches!(all[at].op, Op::Binary(BinaryOp::Add, ..));
        let found = rounds_up && all[at].operands[2] == two;
        if found {
            all[at].operands[2] = Operand::Imm(Imm::Int(0));
        }
        found
    });
    let said = reasons(&Bound { kernel, ..right });
    assert!(said.contains("wrong answer"), "{said}");
}

/// Every store and every comparison of the merge is needed. Hazards name their kernel.
#[test]
fn faults_in_either_kernel_are_refused() {
    let right = three_splits();
    for fault in [Fault::SkipStore, Fault::ComparisonOffByOne] {
        let count = sites(&right.then[0], fault);
        assert!(count > 0, "{fault:?}");
        for site in 0..count {
            let merge = mutant(&right.then[0], fault, site).unwrap();
            let said = reasons(&Bound { then: vec![merge], ..right.clone() });
            assert!(!said.contains("flash_forward_mma"), "{fault:?} {site}: {said}");
        }
    }
    for fault in [Fault::DropAsyncWait, Fault::DropBarrier] {
        let refused = (0..sites(&right.kernel, fault)).find_map(|site| {
            let kernel = mutant(&right.kernel, fault, site)?;
            let check = check_kernel(&Bound { kernel, ..right.clone() }, &Settings::quick()).unwrap();
            (check.verdict == Verdict::Failed).then(|| check.reasons.join("; "))
        });
        assert!(refused.unwrap().contains("(launch 1 of 2, flash_forward_mma"), "{fault:?}");
    }
}
