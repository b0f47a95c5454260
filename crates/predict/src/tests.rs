//! Tests with micro-kernels whose time is known, on the machines of the table.

use ptx::*;

use super::machine::{A100, H200, L4};
use super::*;
use crate::resources::{ResourceSource, Resources};
use emu::trace::{CtaTrace, LaneAddresses, Recorder};

mod asynchronous;

const RESOURCES: Resources = Resources {
    registers: 32,
    spill_stores: 0,
    spill_loads: 0,
    stack: 0,
    shared: 0,
    source: ResourceSource::Estimate,
};

/// A kernel written instruction by instruction.
struct Code {
    body: Body,
}

impl Code {
    fn new() -> Code {
        Code { body: Body::default() }
    }

    fn reg(&mut self, ty: Type) -> Reg {
        self.body.registers.push(Register { name: "%r".into(), ty });
        Reg(self.body.registers.len() as u32 - 1)
    }

    fn push(&mut self, op: Op, operands: impl IntoIterator<Item = Operand>) {
        self.body.statements.push(Statement::Inst(Instruction {
            guard: None,
            op,
            operands: operands.into_iter().collect(),
            line: 0,
        }));
    }

    fn fma(&mut self, d: Reg, a: Reg) {
        self.push(Op::Ternary(TernaryOp::Fma, Type::F32, FloatMods::RN), [d, d, a, a].map(Operand::Reg));
    }

    fn load(&mut self, space: Space, d: Reg, address: Reg) {
        let address = Address { base: Base::Reg(address), offset: 0 };
        self.push(Op::Ld(Memory::plain(space, Type::F32)), [Operand::Reg(d), Operand::Address(address)]);
    }

    fn store(&mut self, space: Space, address: Reg, value: Reg) {
        let address = Address { base: Base::Reg(address), offset: 0 };
        self.push(Op::St(Memory::plain(space, Type::F32)), [Operand::Address(address), Operand::Reg(value)]);
    }

    fn module(&self) -> Module {
        let entry = Function {
            kind: FunctionKind::Entry,
            linkage: Linkage::Visible,
            name: "k".into(),
            returns: Vec::new(),
            params: Vec::new(),
            bounds: LaunchBounds::default(),
            body: Some(self.body.clone()),
        };
        Module {
            version: Version { major: 7, minor: 8 },
            target: Target::sm(80),
            items: vec![Item::Function(entry)],
        }
    }

    fn len(&self) -> u32 {
        self.body.statements.iter().filter(|s| matches!(s, Statement::Inst(_))).count() as u32
    }

    /// The prediction for a grid of equal CTAs. `record` records each warp.
    fn run(&self, gpu: &Gpu, grid: u32, warps: u32, record: impl Fn(&mut Recorder, usize)) -> Prediction {
        let mut recorder = Recorder::new(0, warps as usize, Recorder::DEFAULT_LIMIT);
        (0..warps as usize).for_each(|warp| record(&mut recorder, warp));
        self.predict(gpu, grid, warps, &[recorder.finish()], 0)
    }

    fn predict(&self, gpu: &Gpu, grid: u32, warps: u32, traces: &[CtaTrace], footprint: u64) -> Prediction {
        predict_module(&self.module(), gpu, grid, warps, traces, footprint)
    }
}

fn predict_module(
    module: &Module,
    gpu: &Gpu,
    grid: u32,
    warps: u32,
    traces: &[CtaTrace],
    footprint: u64,
) -> Prediction {
    let launch = Launch::new(Dim3(grid, 1, 1), Dim3(32 * warps, 1, 1));
    let subject = Subject {
        module,
        launch: &launch,
        traced: launch.grid,
        traces,
        resources: &RESOURCES,
        footprint,
        cache: CacheState::Cold,
    };
    predict(&subject, gpu).unwrap_or_else(|e| panic!("{e}"))
}

/// Records every instruction once, without memory accesses.
fn straight(code: &Code) -> impl Fn(&mut Recorder, usize) {
    repeated(code, 1)
}

/// Records all instructions `times` times, one pass after the other.
fn repeated(code: &Code, times: u32) -> impl Fn(&mut Recorder, usize) {
    let len = code.len();
    move |recorder, warp| (0..times * len).for_each(|i| recorder.issue(warp, i % len, !0))
}

fn strided(bytes: u64) -> LaneAddresses {
    std::array::from_fn(|lane| lane as u64 * bytes)
}

#[track_caller]
fn near(value: f64, expected: f64, tolerance: f64) {
    assert!((value / expected - 1.0).abs() <= tolerance, "{value} is not within {tolerance} of {expected}");
}

#[test]
fn a_chain_of_fma_takes_four_clocks_each() {
    let mut code = Code::new();
    let (d, a) = (code.reg(Type::F32), code.reg(Type::F32));
    (0..1000).for_each(|_| code.fma(d, a));
    let p = code.run(&L4, 1, 1, repeated(&code, 5));
    near(p.cycles, 20000.0, 0.01);
    assert_eq!(p.bound, Bottleneck::Latency);
    assert!(p.share(Cause::Arithmetic) > 0.2);
}

#[test]
fn independent_fma_fill_the_issue_slots() {
    let mut code = Code::new();
    let a = code.reg(Type::F32);
    let d: Vec<Reg> = (0..16).map(|_| code.reg(Type::F32)).collect();
    (0..100).for_each(|_| d.iter().for_each(|d| code.fma(*d, a)));
    // Eight warps on four schedulers: two each. 128 lanes issue one warp instruction per clock and
    // sub-partition.
    let p = code.run(&L4, 1, 8, repeated(&code, 5));
    near(p.cycles, 16000.0, 0.02);
    near(p.utilisation.issue, 1.0, 0.02);
    assert_eq!(p.bound, Bottleneck::Fma);
    // 64 lanes issue one warp instruction in two clocks.
    near(code.run(&A100, 1, 8, straight(&code)).cycles, 6400.0, 0.02);
}

#[test]
fn bank_conflicts_take_a_wavefront_each() {
    let mut code = Code::new();
    let address = code.reg(Type::U32);
    let d: Vec<Reg> = (0..8).map(|_| code.reg(Type::F32)).collect();
    (0..50).for_each(|_| d.iter().for_each(|d| code.load(Space::Shared, *d, address)));
    let cycles = |gpu: &Gpu, stride: u64| {
        let len = code.len();
        let p = code.run(gpu, 1, 8, move |r, warp| {
            (0..4 * len).for_each(|i| r.shared(warp, i % len, !0, &strided(stride), 4));
        });
        assert_eq!(p.bound, Bottleneck::Shared);
        p.cycles
    };
    near(cycles(&H200, 4), 1600.0 * 8.0, 0.05);
    near(cycles(&H200, 128), 1600.0 * 8.0 * 32.0, 0.05);
    // Sixteen load-store units process the addresses of a warp in two clocks. Bank conflicts hide that time.
    near(cycles(&L4, 4), 1600.0 * 8.0 * 2.0, 0.05);
    near(cycles(&L4, 128), 1600.0 * 8.0 * 32.0, 0.05);
}

/// One warp gets a pass every two clocks. A second warp of the same sub-partition uses the passes in between
/// (observed on an H200).
#[test]
fn two_warps_of_a_sub_partition_share_the_banks() {
    let mut code = Code::new();
    let address = code.reg(Type::U32);
    let d: Vec<Reg> = (0..8).map(|_| code.reg(Type::F32)).collect();
    (0..50).for_each(|_| d.iter().for_each(|d| code.load(Space::Shared, *d, address)));
    let cycles = |busy: &'static [usize]| {
        let len = code.len();
        let p = code.run(&H200, 1, 8, move |r, warp| {
            if busy.contains(&warp) {
                (0..4 * len).for_each(|i| r.shared(warp, i % len, !0, &strided(128), 4));
            }
        });
        p.cycles
    };
    near(cycles(&[0]), 1600.0 * 64.0, 0.05);
    near(cycles(&[0, 4]), 1600.0 * 64.0, 0.05);
    near(cycles(&[0, 1, 4, 5]), 1600.0 * 128.0, 0.05);
}

#[test]
fn special_functions_come_sixteen_a_clock() {
    let mut code = Code::new();
    let a = code.reg(Type::F32);
    let d: Vec<Reg> = (0..8).map(|_| code.reg(Type::F32)).collect();
    let ex2 = Op::Unary(UnaryOp::Ex2, Type::F32, FloatMods::APPROX_FTZ);
    (0..50).for_each(|_| d.iter().for_each(|d| code.push(ex2, [*d, a].map(Operand::Reg))));
    let p = code.run(&H200, 132, 8, straight(&code));
    near(p.cycles, 400.0 * 8.0 * 32.0 / 16.0, 0.03);
    assert_eq!(p.bound, Bottleneck::Mufu);
}

/// `for i in 0..n { m = max(m, shared[i]) }`, not unrolled, by one thread.
fn serial_loop() -> (Code, [Reg; 4]) {
    let mut code = Code::new();
    let (m, x) = (code.reg(Type::F32), code.reg(Type::F32));
    let (address, p) = (code.reg(Type::U32), code.reg(Type::Pred));
    code.body.labels.push("loop".into());
    code.body.statements.push(Statement::Label(Label(0)));
    code.load(Space::Shared, x, address);
    code.push(Op::Binary(BinaryOp::Max, Type::F32, FloatMods::NONE), [m, m, x].map(Operand::Reg));
    let step = Operand::Imm(Imm::Int(4));
    code.push(
        Op::Binary(BinaryOp::Add, Type::U32, FloatMods::NONE),
        [Operand::Reg(address), Operand::Reg(address), step],
    );
    let compare = Op::Setp { cmp: CmpOp::Lt, combine: None, ty: Type::U32, ftz: false };
    code.push(compare, [Operand::Reg(p), Operand::Reg(address), Operand::Imm(Imm::Int(4096))]);
    let branch = Instruction {
        guard: Some(Guard { reg: p, negated: false }),
        op: Op::Bra { uni: false },
        operands: [Operand::Label(Label(0))].into_iter().collect(),
        line: 0,
    };
    code.body.statements.push(Statement::Inst(branch));
    (code, [m, x, address, p])
}

fn record_serial(recorder: &mut Recorder, warp: usize, iterations: u64, lanes: u32) {
    for i in 0..iterations {
        recorder.shared(warp, 0, lanes, &[4 * i; 32], 4);
        (1..5).for_each(|pc| recorder.issue(warp, pc, lanes));
    }
}

#[test]
fn a_serial_loop_waits_for_shared_memory() {
    let (mut code, _) = serial_loop();
    // As ptxas lays it out: loads of several iterations in flight, one chain of max, one branch.
    let unrolled = code.run(&L4, 1, 1, |r, warp| record_serial(r, warp, 1024, 1)).cycles / 1024.0;
    assert!((4.0..14.0).contains(&unrolled), "{unrolled} clocks an iteration");
    // Without unrolling, each iteration has its own load, max and branch.
    code.body.statements.insert(0, Statement::Pragma("nounroll".into()));
    let rolled = code.run(&L4, 1, 1, |r, warp| record_serial(r, warp, 1024, 1)).cycles / 1024.0;
    assert!((23.0..45.0).contains(&rolled), "{rolled} clocks an iteration");
}

/// The dot product of two rows of 64 halves in shared memory. Rows are `row_bytes` bytes apart.
fn half_dot(row_bytes: u32) -> Module {
    let mut k = Builder::kernel("k");
    let rows = k.shared_array("rows", 16, 32768);
    let tid = k.special(SpecialReg::TidX);
    let row = k.shared_index(rows, tid, row_bytes);
    let sum: F32 = k.mov(0.0);
    k.for_range(0, 64, 1, |k, i| {
        let at = k.shared_index(row, i, 2);
        let (x, y) = (k.ld::<R16>(at), k.ld::<R16>(at.at(16384)));
        let (x, y) = (k.to_f32(Half::F16, x), k.to_f32(Half::F16, y));
        k.mad_to(sum, x, y, sum);
    });
    let out = k.param_pointer("out");
    let to = k.index(out, tid, 4);
    k.st(to, sum);
    k.into_module(Target::sm(80))
}

/// Counts for the layout of the module's loop: the unroll factor, shared loads, FMA-pipe instructions and all
/// instructions.
fn loop_counts(module: &Module) -> (u32, u32, u32, u32) {
    let program = lower::LoweredModule::new(module, &L4);
    let block = program.blocks.iter().find(|b| b.is_loop).unwrap_or_else(|| panic!("no loop"));
    let layout = schedule::layout(&program, block, block.unroll, &L4);
    let count = |wanted: &dyn Fn(&schedule::Step) -> bool| {
        layout.steps.iter().filter(|s| wanted(s)).map(|s| s.cost.slots).sum::<u32>()
    };
    (
        block.unroll,
        count(&|s| matches!(s.action, lower::Action::Shared(_))),
        count(&|s| s.cost.pipe == cost::Pipe::Fma),
        count(&|_| true),
    )
}

#[test]
fn loops_come_out_as_ptxas_makes_them() {
    // ptxas 13 for sm_89: 64 unrolled iterations have 32 LDS.64, 64 FFMA, 128 HADD2.F32 and nothing else.
    let (unroll, loads, fma, all) = loop_counts(&half_dot(128));
    let iterations = |n: u32| n * unroll;
    assert!(unroll == 32, "{unroll}");
    assert_eq!(loads, iterations(2) / 4);
    assert_eq!(fma, iterations(1) + 1, "and the address of the first");
    assert!(all <= iterations(3) + iterations(2) / 4 + 4, "{all} of {unroll}");
    // Rows of 130 bytes have an alignment of 2, and no loads can be joined.
    assert_eq!(loop_counts(&half_dot(130)).1, iterations(2));
}

/// Records `half_dot` as one warp runs it. Each lane has a row of 128 bytes.
fn record_half_dot(module: &Module, recorder: &mut Recorder, warp: usize) {
    let body = module.function("k").and_then(|f| f.body.as_ref());
    let code: Vec<&Instruction> = body
        .iter()
        .flat_map(|b| &b.statements)
        .filter_map(|s| if let Statement::Inst(i) = s { Some(i) } else { None })
        .collect();
    let program = lower::LoweredModule::new(module, &L4);
    let block = program.blocks.iter().find(|b| b.is_loop).unwrap_or_else(|| panic!("no loop"));
    (0..block.start).for_each(|pc| recorder.issue(warp, pc, !0));
    for i in 0..64u64 {
        for pc in block.start..block.start + block.len {
            let at: LaneAddresses =
                std::array::from_fn(|lane| 128 * (lane as u64 + 32 * warp as u64) + 2 * i);
            match code[pc as usize].op {
                Op::Ld(_) => recorder.shared(warp, pc, !0, &at, 2),
                _ => recorder.issue(warp, pc, !0),
            }
        }
    }
}

#[test]
fn rows_of_halves_take_what_an_h200_takes() {
    // Measured between two reads of %clock64, with one CTA: 2109 clocks for one warp, 4165 for four. Every
    // LDS.64 has a 16-way conflict in each half-warp.
    let module = half_dot(128);
    for (warps, clocks) in [(1, 2109.0), (4, 4165.0)] {
        let mut recorder = Recorder::new(0, warps, Recorder::DEFAULT_LIMIT);
        (0..warps).for_each(|warp| record_half_dot(&module, &mut recorder, warp));
        let p = predict_module(&module, &H200, 1, warps as u32, &[recorder.finish()], 0);
        near(p.cycles, clocks, 0.10);
    }
}

#[test]
fn a_dependent_load_chain_takes_the_latency() {
    let mut code = Code::new();
    let address = code.reg(Type::U32);
    (0..200).for_each(|_| code.load(Space::Shared, address, address));
    let p = code.run(&L4, 1, 1, |r, w| (0..200).for_each(|pc| r.shared(w, pc, 1, &strided(0), 4)));
    near(p.cycles / 200.0, 23.0, 0.05);
    assert_eq!(p.bound, Bottleneck::Latency);
    assert!(p.share(Cause::SharedLatency) > 0.3);
}

#[test]
fn warps_that_wait_for_one_make_it_serial() {
    let (mut code, _) = serial_loop();
    code.push(Op::Bar { kind: BarKind::Sync, aligned: true }, [Operand::Imm(Imm::Int(0))]);
    let p = code.run(&L4, 16, 4, |r, warp| {
        if warp == 0 {
            record_serial(r, warp, 2000, 1);
        }
        r.barrier(warp, 5, !0, 0, BarKind::Sync, 128);
    });
    assert_eq!(p.bound, Bottleneck::Serial);
    assert!(p.share(Cause::Barrier) > 0.5);
    near(p.active_sms, 16.0 / 58.0, 0.01);
    assert_eq!(p.ctas, 16);
}

#[test]
fn mma_reaches_the_tensor_peak() {
    let mut code = Code::new();
    let a: Vec<Operand> = (0..4).map(|_| Operand::Reg(code.reg(Type::B32))).collect();
    let tiles: Vec<Vec<Operand>> =
        (0..8).map(|_| (0..4).map(|_| Operand::Reg(code.reg(Type::F32))).collect()).collect();
    let mma = Op::Mma(Mma::new(MmaShape::M16N8K16, Type::F32, Type::F16, Type::F16, Type::F32));
    for c in (0..50).flat_map(|_| &tiles) {
        code.push(mma, [c.clone(), a.clone(), a[..2].to_vec(), c.clone()].map(Operand::Vector));
    }
    for gpu in [&A100, &L4, &H200] {
        let p = code.run(gpu, gpu.sms * 32, 8, straight(&code));
        assert_eq!(p.bound, Bottleneck::Tensor, "{}", gpu.name);
        near(p.utilisation.tensor, 1.0, 0.03);
        // At the clock that the power limit allows.
        near(p.tensor_share, p.clock_mhz / gpu.clock_mhz, 0.10);
        near(p.tensor_fraction, 1.0, 1e-6);
    }
    // One chain: each product takes its latency.
    let mut chain = Code::new();
    chain.body.registers = code.body.registers.clone();
    (0..100).for_each(|_| {
        chain
            .push(mma, [tiles[0].clone(), a.clone(), a[..2].to_vec(), tiles[0].clone()].map(Operand::Vector));
    });
    near(chain.run(&A100, 1, 1, straight(&chain)).cycles, 2500.0, 0.02);
}

#[test]
fn wmma_takes_the_time_of_its_two_mma() {
    let (mut whole, mut halves) = (Code::new(), Code::new());
    let wmma = Op::Wmma(ptx::Wmma::f16(ptx::MatrixOrder::Row, ptx::MatrixOrder::Col));
    let mma = Op::Mma(Mma::new(MmaShape::M16N8K16, Type::F32, Type::F16, Type::F16, Type::F32));
    let fragments = |code: &mut Code| {
        let a: Vec<Operand> = (0..8).map(|_| Operand::Reg(code.reg(Type::B32))).collect();
        let sums: Vec<Operand> = (0..32).map(|_| Operand::Reg(code.reg(Type::F32))).collect();
        (a, sums)
    };
    let (a, sums) = fragments(&mut whole);
    fragments(&mut halves);
    for c in (0..50).flat_map(|_| sums.chunks(8)) {
        whole.push(wmma, [c, &a, &a, c].map(|v| Operand::Vector(v.to_vec())));
        for half in c.chunks(4) {
            halves.push(mma, [half, &a[..4], &a[..2], half].map(|v| Operand::Vector(v.to_vec())));
        }
    }
    for gpu in [&A100, &L4, &H200] {
        let grid = gpu.sms * 32;
        let (one, two) =
            (whole.run(gpu, grid, 8, straight(&whole)), halves.run(gpu, grid, 8, straight(&halves)));
        near(one.cycles, two.cycles, 0.03);
        near(one.utilisation.tensor, 1.0, 0.03);
    }
}

#[test]
fn a_copy_reaches_the_bandwidth_of_dram() {
    let mut code = Code::new();
    let address = code.reg(Type::U64);
    let x: Vec<Reg> = (0..8).map(|_| code.reg(Type::F32)).collect();
    x.iter().for_each(|x| code.load(Space::Global, *x, address));
    x.iter().for_each(|x| code.store(Space::Global, address, *x));
    let grid = 132 * 32;
    let p = {
        let mut recorder = Recorder::new(0, 8, Recorder::DEFAULT_LIMIT);
        for warp in 0..8 {
            for pc in 0..16u64 {
                let lane: LaneAddresses =
                    std::array::from_fn(|l| pc << 24 | (warp as u64) << 16 | (l as u64) << 4);
                recorder.global(warp, pc as u32, !0, &lane, 16);
            }
        }
        code.predict(&H200, grid, 8, &[recorder.finish()], u64::from(grid) * 8 * 16 * 512)
    };
    // Each CTA has 8 warps with 8 loads and 8 stores of 512 bytes.
    let gbps = f64::from(grid) * 8.0 * 16.0 * 512.0 / (p.us - H200.launch_us) * 1e-3;
    near(gbps, 0.9 * 4800.0, 0.05);
    assert_eq!(p.bound, Bottleneck::Dram);
}

#[test]
fn an_empty_kernel_takes_the_launch() {
    let mut code = Code::new();
    code.push(Op::Ret { uni: false }, []);
    for gpu in machine::MACHINES {
        let p = code.run(gpu, 1, 1, straight(&code));
        near(p.us, gpu.launch_us, 0.02);
        assert_eq!(p.bound, Bottleneck::Launch);
    }
}

#[test]
fn waves_and_tails() {
    let mut code = Code::new();
    let (d, a) = (code.reg(Type::F32), code.reg(Type::F32));
    (0..500).for_each(|_| code.fma(d, a));
    let of = |grid: u32| code.run(&L4, grid, 4, straight(&code));
    let one = of(1).cycles;
    near(of(58).cycles, one, 0.01);
    near(of(58 * 12).cycles, one.max(12.0 * 500.0), 0.05);
    let p = of(58 * 12 + 1);
    assert!((6500.0..6300.0 + one).contains(&p.cycles), "one CTA more, when another is done: {}", p.cycles);
    assert!(p.tail > 0.05 && p.waves > 1.0, "{p:?}");
}

#[test]
fn spilled_arrays_that_outgrow_l1_go_to_l2() {
    let mut code = Code::new();
    let address = code.reg(Type::U64);
    let x = code.reg(Type::F32);
    code.load(Space::Local, x, address);
    let us = |words: u64| {
        let p = code.run(&L4, 58, 8, |r, warp| {
            for i in 0..8192 {
                r.local(warp, 0, !0, &[4 * (i % words); 32], 4);
            }
        });
        (p.us, p.roofline.l2_bytes)
    };
    let (small, none) = us(8);
    let (large, traffic) = us(2048);
    assert_eq!(none, 0.0);
    assert!(traffic > 1e6 && large > 1.3 * small, "{small} {large} {traffic}");
}

#[test]
fn the_split_sums_to_one_and_repeats() {
    let (code, _) = serial_loop();
    let run = || code.run(&L4, 100, 4, |r, warp| record_serial(r, warp, 100, !0));
    let p = run();
    near(p.split.iter().map(|(_, s)| s).sum(), 1.0, 1e-9);
    assert_eq!(p, run());
    assert!(p.us_low < p.us && p.us < p.us_high);
}

#[test]
fn resources_are_estimated_without_ptxas_and_read_with_it() {
    let module = half_dot(128);
    let Some(guess) = crate::resources::estimate(&module, "k") else { panic!("no entry") };
    assert_eq!((guess.shared, guess.spill_loads, guess.stack), (32768, 0, 0));
    assert!((12..40).contains(&guess.registers), "{guess:?}");
    assert_eq!(crate::resources::estimate(&module, "absent"), None);
    // Where ptxas is available, check its figures.
    let Ok(ptxas) = crate::resources::Ptxas::find() else { return };
    let found = ptxas.resources(&module.to_string(), "sm_89", "k").unwrap_or_else(|e| panic!("{e}"));
    assert_eq!((found.shared, found.spill_loads), (32768, 0));
    assert_eq!(found.source, ResourceSource::Ptxas(ptxas.version().to_owned()));
    let rejected = |ptx: &str| ptxas.resources(ptx, "sm_89", "k").map_err(|e| e.to_string()).unwrap_err();
    assert_eq!(rejected("not ptx"), rejected("not ptx"), "the message names no temporary file");
    assert!(rejected("not ptx").contains("<PTX>, line 1"), "{}", rejected("not ptx"));
    assert!(ptxas.resources(&module.to_string(), "sm_89", "absent").is_err());
}

#[test]
fn a_long_kernel_is_replayed_in_part() {
    let (code, _) = serial_loop();
    let of = |grid: u32| code.run(&L4, grid, 8, |r, warp| record_serial(r, warp, 2000, !0));
    let (few, many) = (of(58 * 6), of(58 * 600));
    assert_eq!(few.replayed, 1.0);
    assert!(many.replayed < 0.2);
    near(many.cycles, 100.0 * few.cycles, 0.05);
}

#[test]
fn nothing_traced_is_an_error() {
    let code = Code::new();
    let dim = Dim3(1, 1, 1);
    let mut launch = Launch { cluster: dim, ..Launch::new(dim, dim) };
    let module = code.module();
    let of = |launch: &Launch| {
        let subject = Subject {
            module: &module,
            launch,
            traced: launch.grid,
            traces: &[],
            resources: &RESOURCES,
            footprint: 0,
            cache: CacheState::Warm,
        };
        predict(&subject, &L4).map(|p| p.us)
    };
    assert_eq!(of(&launch), Err(ModelError::NoTrace { grid: 1 }));
    launch.dynamic_shared = 200 << 10;
    assert!(matches!(of(&launch), Err(ModelError::DoesNotFit { machine: "L4", .. })));
}
