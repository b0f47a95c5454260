//! Tests of the ladder's kernels on the emulator: the correct ones match f64 without a hazard, and the wrong
//! ones are rejected for the expected reason.

use check::gate::quantised::{Quantised, dequantise, quantise};
use check::gate::{Settings, Verdict, check_kernel};
use emu::{Buffer, Checks, HazardKind, Options, Report, Schedule};
use flashcore_climb::ladder::{Expected, Inputs, Reason, Rung, RungError, RungKernel, rungs};
use half::f16;
use kernels::Arch;
use predict::resources::Ptxas;
use problem::{Band, DType, Layout, Problem};
use ptx::{Item, Kernel, Statement};
use sha2::{Digest, Sha256};

const SCHEDULES: [Schedule; 3] = [Schedule::Late, Schedule::Early, Schedule::Random];

/// A problem with two key tiles, so that the online softmax must rescale.
fn problem(rung: RungKernel) -> Problem {
    Problem::new(1, 1, 128, 64, DType::F16).with_band(rung.mask())
}

fn kernel(rung: RungKernel, problem: &Problem) -> Kernel {
    rung.bind(problem, &Arch::SM_89).unwrap().kernel
}

/// One schedule: kernels with scalar arithmetic are slow.
#[test]
fn the_gate_passes_right_rungs_and_refuses_wrong_ones_for_their_reason() {
    for rung in rungs() {
        let bound = rung.kernel.bind(&problem(rung.kernel), &Arch::SM_80).unwrap();
        let check = check_kernel(&bound, &Settings::quick().first_run()).unwrap();
        match rung.expected {
            Expected::Passed => {
                assert_eq!(check.verdict, Verdict::Passed, "{}: {:#?}", rung.name, check.reasons);
                assert!(check.runs > 0, "{} was not run", rung.name);
            }
            Expected::Failed(Reason::Race) => {
                assert_eq!(check.verdict, Verdict::Failed, "{}", rung.name);
                assert!(check.reasons[0].contains("race at"), "{}: {:#?}", rung.name, check.reasons);
            }
        }
    }
}

/// Runs a kernel with f16 inputs that differ everywhere; returns the emulator's report and the output.
fn examine(rung: RungKernel, schedule: Schedule, seed: u64) -> (Report, Vec<f16>) {
    let kernel = kernel(rung, &problem(rung));
    let mut buffers: Vec<Buffer> = kernel.buffers.iter().map(|b| Buffer::uninitialised(b.bytes)).collect();
    for (i, buffer) in buffers[..3].iter_mut().enumerate() {
        let element = |e: usize| f16::from_f32(((e * 37 + i * 11) % 101) as f32 / 50.0 - 1.0);
        let bytes: Vec<u8> = (0..buffer.len() / 2).flat_map(|e| element(e).to_le_bytes()).collect();
        *buffer = Buffer::from_bytes(&bytes);
    }
    let options = Options { schedule, seed, checks: Checks::ALL, ..Options::default() };
    let report = emu::run(&kernel, &mut buffers.iter_mut().collect::<Vec<_>>(), &options).unwrap();
    let out = buffers[3].to_bytes().chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]])).collect();
    (report, out)
}

#[test]
fn heads_and_batch_entries_are_told_apart() {
    for rung in [RungKernel::Phase1, RungKernel::Phase6It2] {
        let problem = Problem::new(2, 2, 64, 64, DType::F16).with_band(rung.mask());
        let bound = rung.bind(&problem, &Arch::SM_89).unwrap();
        let check = check_kernel(&bound, &Settings::quick().first_run()).unwrap();
        assert_eq!(check.verdict, Verdict::Passed, "{rung:?}: {:#?}", check.reasons);
    }
}

#[test]
fn the_dropped_barrier_is_a_race_whatever_the_schedule() {
    for (seed, schedule) in (0..).zip(SCHEDULES) {
        let (report, _) = examine(RungKernel::Phase4Race, schedule, seed);
        let between_warps = |h: &&emu::Hazard| {
            let on_scores = h.place.as_ref().is_some_and(|place| place.name == "scores");
            h.kind == HazardKind::Race && on_scores && h.threads[0].warp != h.threads[1].warp
        };
        let race = report.hazards.iter().find(between_warps).expect("the race on the scores");
        assert!(race.threads.iter().any(|thread| thread.warp == 0), "warp 0 writes the scores: {race}");
        for hazard in &report.hazards {
            // A warp that is ahead of warp 0 also reads scores that have not been written yet.
            assert!(matches!(hazard.kind, HazardKind::Race | HazardKind::UninitialisedRead), "{hazard}");
        }
    }
}

#[test]
fn the_repair_is_one_barrier() {
    let statements = |rung| {
        let kernel = kernel(rung, &problem(rung));
        let Some(Item::Function(function)) = kernel.module.items.last().cloned() else { panic!("no entry") };
        function.body.unwrap().statements.iter().filter(|s| matches!(s, Statement::Inst(_))).count()
    };
    assert_eq!(statements(RungKernel::Phase4), statements(RungKernel::Phase4Race) + 1);
}

#[test]
fn the_warps_of_the_nan_reduction_race_for_two_cells_and_give_nan() {
    // The schedule decides which warp writes last. A row is NaN if that warp has no scores.
    let (report, out) = examine(RungKernel::NanReduction, Schedule::Random, 0);
    assert!(out.chunks(64).any(|row| row.iter().all(|x| x.is_nan())));
    let mut cells: Vec<_> =
        report.hazards.iter().flat_map(|h| h.place.as_ref().map(|p| p.name.as_str())).collect();
    cells.sort_unstable();
    cells.dedup();
    assert_eq!(cells, ["largest", "sum"]);
    for hazard in &report.hazards {
        assert_eq!(hazard.kind, HazardKind::Race, "{hazard}");
        assert_ne!(hazard.threads[0].warp, hazard.threads[1].warp, "{hazard}");
    }
}

/// Runs a kernel on quantised random inputs; returns the emulator's report, the output, and attention in f64
/// on the dequantised codes.
fn run_quantised(rung: RungKernel) -> (Report, Vec<f64>, Vec<f64>) {
    let problem = Problem::new(1, 2, 128, 64, DType::F16);
    let kernel = kernel(rung, &problem);
    let tensor = |i: usize| -> Quantised {
        let value = |e: usize| ((e * e * (7 + i) + e * 37 + i * 11) % 1009) as f32 / 252.0 - 2.0;
        quantise(&(0..2 * 128 * 64).map(value).collect::<Vec<_>>(), 128 * 64)
    };
    let tensors: [Quantised; 3] = std::array::from_fn(tensor);
    let mut buffers: Vec<Buffer> = tensors.iter().map(|t| Buffer::from_bytes(&t.codes)).collect();
    buffers.push(Buffer::uninitialised(kernel.buffers[3].bytes));
    let scales: Vec<u8> = tensors.iter().flat_map(|t| &t.scales).flat_map(|s| s.to_le_bytes()).collect();
    buffers.push(Buffer::from_bytes(&scales));
    let options = Options { schedule: Schedule::Random, seed: 3, ..Options::default() };
    let report = emu::run(&kernel, &mut buffers.iter_mut().collect::<Vec<_>>(), &options).unwrap();
    let out = buffers[3].to_bytes();
    let out = out.chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]]).to_f64()).collect();
    let [q, k, v] = tensors.map(|t| dequantise(&t).into_iter().map(f64::from).collect::<Vec<_>>());
    let heads = q.chunks(128 * 64).zip(k.chunks(128 * 64)).zip(v.chunks(128 * 64));
    let want = heads.flat_map(|((q, k), v)| attention(q, k, v)).collect();
    (report, out, want)
}

/// Attention of one head with rows of 64, in f64.
fn attention(q: &[f64], k: &[f64], v: &[f64]) -> Vec<f64> {
    let row = |q: &[f64]| {
        let dot = |k: &[f64]| q.iter().zip(k).map(|(a, b)| a * b).sum::<f64>() / 8.0;
        let weights: Vec<f64> = k.chunks(64).map(|k| dot(k).exp()).collect();
        let sum: f64 = weights.iter().sum();
        let column = |d: usize| weights.iter().zip(v.chunks(64)).map(|(w, v)| w * v[d]).sum::<f64>() / sum;
        (0..64).map(column).collect::<Vec<f64>>()
    };
    q.chunks(64).flat_map(row).collect()
}

#[test]
fn right_quantised_rungs_match_f64_on_what_the_codes_stand_for() {
    let right = |r: &Rung| r.expected == Expected::Passed && r.inputs == Inputs::Quantised;
    for rung in rungs().into_iter().filter(right) {
        let (report, out, want) = run_quantised(rung.kernel);
        assert!(report.hazards.is_empty(), "{}: {}", rung.name, report.hazards[0]);
        for (i, (got, want)) in out.iter().zip(want).enumerate() {
            // Values are at most 2. The bound covers the rounding of O and V to f16 (2⁻¹¹ of 2 each) and f32
            // sums.
            assert!((got - want).abs() <= 2.0 / 1024.0, "{} element {i}: {got}, should be {want}", rung.name);
        }
    }
}

#[test]
fn the_union_is_a_race() {
    let (report, _, _) = run_quantised(RungKernel::U8StageB);
    assert!(report.hazards.iter().any(|h| h.kind == HazardKind::Race));
}

/// The performance faults that each file's documentation names are visible in the counters.
#[test]
fn counters_show_what_made_each_rung_slow() {
    let counters = |rung| examine(rung, Schedule::Late, 0).0.counters;
    let most_conflicts =
        |c: &emu::Counters| c.instructions.iter().map(|i| i.conflict_degree()).fold(0.0, f64::max);
    let share = |part: u64, c: &emu::Counters| part as f64 / c.critical_issues as f64;

    let minimal = counters(RungKernel::Minimal);
    let scattered = |i: &&emu::Counter| i.global_sectors == 32 * i.global_accesses;
    let sectors: u64 = minimal.instructions.iter().map(|i| i.global_sectors).sum();
    let of_scattered: u64 = minimal.instructions.iter().filter(scattered).map(|i| i.global_sectors).sum();
    assert!(10 * of_scattered > 9 * sectors, "minimal: {of_scattered} of {sectors} sectors, 32 an access");

    let phase1 = counters(RungKernel::Phase1);
    let serial = share(phase1.single_lane_issues, &phase1);
    assert!(serial > 0.2, "phase1: one lane in {serial} of the critical path");
    let scattered = phase1.instructions.iter().filter(scattered).map(|i| i.global_sectors).sum::<u64>();
    assert!(scattered > 0, "phase1: no lane walks along its own key");

    for rung in [RungKernel::Phase3, RungKernel::Phase4, RungKernel::Phase6It1, RungKernel::Phase6It2] {
        let c = counters(rung);
        let lone = share(c.lone_warp_issues, &c);
        assert!(lone > 1.0 / 3.0, "{rung:?}: one warp alone in {lone} of the critical path");
        assert_eq!(most_conflicts(&c), 32.0, "{rung:?}");
        // 64 f32 sums per row, rescaled and added to in each of two tiles. In the other kernels, local memory
        // holds only maxima and sums of a warp's rows, or halves before the vector store.
        let local: u64 = c.instructions.iter().map(|i| i.local_bytes).sum();
        let accumulators = 128 * 64 * 4 * 2 * (2 + 2);
        assert_eq!(
            local > accumulators,
            rung == RungKernel::Phase6It1,
            "{rung:?}: {local} bytes of local memory"
        );
    }

    let p1 = counters(RungKernel::P1Wmma);
    let serial = share(p1.single_lane_issues, &p1);
    assert!(serial > 0.2, "p1_wmma: one lane in {serial} of the critical path");
}

#[test]
fn broken_rungs_say_why_they_are_broken() {
    let broken: Vec<_> = rungs()
        .into_iter()
        .filter_map(|r| match r.expected {
            Expected::Failed(reason) => Some((r.name, reason)),
            Expected::Passed => None,
        })
        .collect();
    assert_eq!(
        broken,
        [("nan_reduction", Reason::Race), ("phase4_race", Reason::Race), ("u8_stage_b", Reason::Race)]
    );
}

#[test]
fn rungs_are_in_the_order_of_the_story() {
    let told = rungs();
    assert_eq!(told.iter().map(|r| r.kernel).collect::<Vec<_>>(), RungKernel::ALL);
    for rung in told.iter().filter(|rung| rung.inputs == Inputs::F16) {
        let kernel = kernel(rung.kernel, &Problem::mission().with_band(rung.mask));
        let sizes: Vec<_> = kernel.buffers.iter().map(|b| (b.name.as_str(), b.bytes)).collect();
        assert_eq!(sizes, ["q", "k", "v", "out"].map(|name| (name, 8 * 512 * 64 * 2)));
    }
}

/// The PTX texts are the committed ones, and with them the machine code: one ptxas makes the same of one
/// text. Arrays that a kernel indexes at run time are in local memory without being spills.
/// `BLESS_MACHINE_CODE=1` writes the file.
#[test]
fn texts_are_the_committed_ones_and_assemble_without_spills() {
    let path = filetest::root().join("ladder.txt");
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    let blesses = std::env::var_os("BLESS_MACHINE_CODE").is_some();
    let version = |ptxas: &Ptxas| format!("ptxas {}\n", ptxas.version());
    let ptxas = Ptxas::find().ok().filter(|ptxas| blesses || committed.contains(&version(ptxas)));
    let known = || committed.lines().find(|line| line.starts_with("ptxas ")).map(|line| format!("{line}\n"));
    let mut found =
        "# PTX text, registers, version, target: see crates/climb/tests/all/ladder.rs\n".to_owned();
    found += &ptxas.as_ref().map(version).or_else(known).unwrap_or_default();
    for (arch, rung) in [Arch::SM_80, Arch::SM_89].iter().flat_map(|arch| RungKernel::ALL.map(|r| (arch, r)))
    {
        let kernel = rung.bind(&Problem::mission().with_band(rung.mask()), arch).unwrap().kernel;
        let (text, target, name) = (kernel.module.to_string(), kernel.module.target.to_string(), rung.name());
        let digest: String = Sha256::digest(&text).iter().take(8).map(|byte| format!("{byte:02x}")).collect();
        let end = format!(" {name} {target}");
        let line = committed.lines().find(|line| line.ends_with(&end)).unwrap_or_default();
        let registers = match &ptxas {
            None => line.split(' ').nth(1).unwrap_or_default().to_owned(),
            Some(ptxas) => {
                let assembled = ptxas.resources(&text, &target, name).unwrap();
                assert_eq!(assembled.spill_stores + assembled.spill_loads, 0, "{name} {target}");
                assembled.registers.to_string()
            }
        };
        found += &format!("{digest} {registers}{end}\n");
    }
    if blesses {
        std::fs::write(&path, &found).unwrap();
    } else {
        assert_eq!(found, committed);
    }
}

#[test]
fn other_problems_are_refused_by_name() {
    let refusal = |problem: Problem| match RungKernel::Phase4.bind(&problem, &Arch::SM_89) {
        Err(RungError::Problem { rung: "phase4", what, value, accepted }) => (what, value, accepted),
        other => panic!("{problem:?}: {:?}", other.map(|bound| bound.kernel.entry)),
    };
    let mission = Problem::mission;
    let bf16 = Problem { dtypes: DType::Bf16.into(), ..mission() };
    for (problem, argument, given) in [
        (mission().with_band(Band::CAUSAL), "mask", "causal"),
        (mission().with_layout(Layout::Bshd), "the strides of", "q"),
        (bf16, "dtype", "bf16"),
        (mission().with_softcap(5.0), "features", "some"),
        (mission().with_lse(true), "lse", "true"),
        (Problem::new(1, 8, 512, 128, DType::F16), "head_dim", "128"),
        (Problem::new(1, 8, 500, 64, DType::F16), "seq_q", "500"),
        (Problem::new(1, 8, 8256, 64, DType::F16), "seq_q", "8256"),
        (mission().with_seq_kv(256, Layout::Bhsd), "seq_kv", "256"),
        (mission().with_heads_kv(2, Layout::Bhsd), "heads_kv", "2"),
    ] {
        let (what, value, accepted) = refusal(problem);
        assert_eq!((what, value.as_str()), (argument, given), "{accepted}");
    }
}
