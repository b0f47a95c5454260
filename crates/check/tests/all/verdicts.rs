//! Tests the lists on which the gate is judged: kernels that it must reject, each for its reason; kernels
//! that it must pass; and the synchronisation in the latter that must not be removed. Single idioms are in
//! `filetests/hazard` and `filetests/run`; faults at every site of the fused family are in `gate.rs`.

use crate::common::small_tiles;
use flashcore_check::gate::mutate::{Fault, mutant, sites};
use flashcore_check::gate::{Settings, Verdict, check_kernel};
use flashcore_check::launchfile::{Bound, LaunchSpec};
use kernels::forward::mma::QueryHome;
use problem::{Band, DType, Layout, Problem};
use ptx::{Item, Kernel, Op, Statement};

/// The fused family, causal, with ragged tails and several blocks of keys.
fn fused_as(seq_q: usize, seq_kv: usize, queries: QueryHome, stages: u32) -> Bound {
    let problem = Problem::new(1, 1, seq_q, 64, DType::F16).with_seq_kv(seq_kv, Layout::Bhsd);
    small_tiles(&problem.with_band(Band::CAUSAL), queries, stages)
}

/// The first rows see less than a key block, so that later blocks do not hide an error there.
fn fused() -> Bound {
    fused_as(170, 217, QueryHome::Registers, 2)
}

/// A kernel of `filetests/corpus`, launched as in its launch file; `None` where NVRTC is needed and not
/// installed.
fn compiled(name: &str, sm: u32) -> Option<Bound> {
    let text = filetest::corpus(&format!("{name}_sm{sm}"))?;
    let file = filetest::root().join("corpus").join(format!("{name}.toml"));
    let launch: LaunchSpec = std::fs::read_to_string(file).unwrap().parse().unwrap();
    Some(launch.bind(ptx::parse(&text).unwrap().verify().unwrap()).unwrap())
}

/// Outputs that lose NaN: right for all finite inputs, and told so. Without such inputs the kernel passes.
#[test]
fn a_kernel_that_fails_only_special_values_is_told_so() {
    let lost =
        |line: &str| match line.split_once("cvt.rn.f16.f32 ").and_then(|(_, rest)| rest.split_once(", ")) {
            // PTX ISA, "max": a NaN operand is dropped.
            Some((_, x)) => format!("max.f32 {0}, {0}, 0fC77FE000;\n{line}\n", x.trim_end_matches(';')),
            None => format!("{line}\n"),
        };
    let Some(text) = filetest::corpus("cuda_flash_sm80") else { return };
    let text: String = text.lines().map(lost).collect();
    let launch = std::fs::read_to_string(filetest::root().join("corpus/cuda_flash.toml")).unwrap();
    let verdict = |launch: &str| {
        let spec: LaunchSpec = launch.parse().unwrap();
        let bound = spec.bind(ptx::parse(&text).unwrap().verify().unwrap()).unwrap();
        check_kernel(&bound, &Settings::thorough()).unwrap()
    };
    let all = verdict(&launch);
    assert_eq!(all.verdict, Verdict::Failed);
    let told = "only inputs that are not finite fail (NaN and Inf): all runs on finite inputs passed";
    assert!(all.reasons.iter().any(|reason| reason.starts_with(told)), "{:?}", all.reasons);
    let finite = verdict(&launch.replace("[launch]", "inputs = \"finite\"\n\n[launch]"));
    assert_eq!((finite.verdict, finite.runs), (Verdict::Passed, 12), "{:?}", finite.reasons);
    let error = launch.replace("[launch]", "inputs = \"some\"\n\n[launch]").parse::<LaunchSpec>();
    let error = error.unwrap_err().to_string();
    assert!(error.contains("invalid value 'some' for problem.inputs: expected all or finite"), "{error}");
}

/// The kernel with a fault at one of its sites.
fn with(fault: Fault, site: usize, bound: Bound) -> Bound {
    let kernel = mutant(&bound.kernel, fault, site).unwrap_or_else(|| panic!("{fault:?} has no site {site}"));
    Bound { kernel, ..bound }
}

/// The kernel with a fault at the first site after the first instruction of a kind.
fn with_behind(first: fn(&Op) -> bool, fault: Fault, bound: Bound) -> Bound {
    let mut before = bound.kernel.module.clone().into_module();
    for item in &mut before.items {
        if let Item::Function(function) = item
            && let Some(body) = &mut function.body
        {
            let at = body.statements.iter().position(|s| matches!(s, Statement::Inst(i) if first(&i.op)));
            body.statements.truncate(at.expect("an instruction of the kind"));
        }
    }
    let before = Kernel { module: before.assume_verified(), ..bound.kernel.clone() };
    with(fault, sites(&before, fault), bound)
}

/// The kernel launched with one row of CTAs too few.
fn short_of_a_cta(mut bound: Bound) -> Bound {
    bound.kernel.launch.grid.0 -= 1;
    bound
}

/// Kernels that must be rejected, with the words of the reason.
fn must_fail() -> Vec<(&'static str, Bound, &'static str)> {
    use Fault::{
        ComparisonOffByOne, DropAsyncWait, DropBarrier, DropCopy, DropFence, DropWarpBarrier, SkipRescale,
        SkipStore, WrongScale,
    };
    let product = |op: &Op| matches!(op, Op::Mma(_));
    // A copy for blocks after the diagonal, whose stages have all held other blocks before.
    let last_copy = sites(&fused().kernel, DropCopy) - 1;
    let short_tail = fused_as(135, 249, QueryHome::Registers, 2);
    let split = |site| Some(with(DropFence, site, compiled("cuda_split_reduce", 80)?));
    let mut cases = vec![
        ("a barrier is dropped", with(DropBarrier, 1, fused()), "race at"),
        ("a barrier of a warp is dropped", with(DropWarpBarrier, 1, fused()), "race at"),
        ("a wait for copies is dropped", with(DropAsyncWait, 1, fused()), "async_not_waited at"),
        ("the mask is off by one", with_behind(product, ComparisonOffByOne, fused()), "wrong answer"),
        // The problem's last row lies in the first quarter of a tile.
        ("an index is off by one", with(ComparisonOffByOne, 0, short_tail), "out_of_bounds at"),
        ("a rescale is missing", with(SkipRescale, 0, fused()), "wrong answer"),
        ("a tile is stale", with(DropCopy, last_copy, fused()), "wrong answer"),
        ("a tile is never loaded", with(DropCopy, 0, fused()), "uninitialised_read at"),
        ("the tail is not written", short_of_a_cta(fused()), "unwritten_output at"),
        ("a store is left out", with(SkipStore, 0, fused()), "unwritten_output at"),
        ("the scale is wrong", with(WrongScale, 0, fused()), "wrong answer"),
    ];
    let fences = ["no fence before the flag of another CTA", "no fence after the flag of another CTA"];
    let flags =
        fences.into_iter().enumerate().filter_map(|(site, name)| Some((name, split(site)?, "race at")));
    cases.extend(flags);
    cases
}

#[test]
fn what_must_fail_fails_for_its_reason() {
    for (name, bound, reason) in must_fail() {
        let check = check_kernel(&bound, &Settings::quick()).unwrap();
        let first = check.reasons.first().map_or("", String::as_str);
        assert_eq!(check.verdict, Verdict::Failed, "{name}");
        assert!(first.contains(reason), "{name}: {reason} expected, but: {:#?}", check.reasons);
    }
}

/// Compiled from this project's sources in `filetests/corpus/src`.
const COMPILED: [&str; 17] = [
    "cuda_dispatch",
    "cuda_flash",
    "cuda_histogram",
    "cuda_layernorm",
    "cuda_matmul",
    "cuda_scan",
    "cuda_softmax",
    "cuda_split_reduce",
    "cuda_transpose",
    "triton_flash",
    "triton_histogram",
    "triton_layernorm",
    "triton_matmul",
    "triton_scan",
    "triton_softmax",
    "triton_split_reduce",
    "triton_transpose",
];

fn assert_passes(name: &str, bound: &Bound, settings: &Settings) {
    let check = check_kernel(bound, settings).unwrap();
    assert_eq!(check.verdict, Verdict::Passed, "{name}: {:#?}", check.reasons);
    assert!(check.runs > 0, "{name} was not run");
}

#[test]
fn what_compilers_make_passes() {
    for name in COMPILED {
        for sm in [80, 89] {
            let name_sm = format!("{name} sm_{sm}");
            if let Some(kernel) = compiled(name, sm) {
                assert_passes(&name_sm, &kernel, &Settings::thorough());
            }
        }
    }
}

#[test]
fn what_is_right_passes() {
    for (queries, stages) in [(QueryHome::Registers, 2), (QueryHome::Shared, 1), (QueryHome::Shared, 3)] {
        let fused = fused_as(170, 217, queries, stages);
        assert_passes(&format!("fused, {queries:?}, {stages} stages"), &fused, &Settings::thorough());
    }
}

/// Synchronisation that Triton emits and that has no effect on the order in these launches.
const IDLE: [(&str, Fault, usize, &str); 8] = [
    (
        "triton_flash",
        Fault::DropBarrier,
        2,
        "the loop ends with a barrier: only a CTA without keys needs this one",
    ),
    ("triton_flash", Fault::DropAsyncWait, 1, "nobody reads what is requested past the last block"),
    ("triton_histogram", Fault::DropBarrier, 1, "nobody writes shared memory any more"),
    ("triton_histogram", Fault::DropBarrier, 2, "nor reads it"),
    ("triton_matmul", Fault::DropBarrier, 1, "another stands right before the loop, and at its end"),
    ("triton_matmul", Fault::DropAsyncWait, 1, "the same wait stands there, too"),
    ("triton_matmul", Fault::DropAsyncWait, 2, "it stands there twice"),
    ("triton_matmul", Fault::DropAsyncWait, 3, "it stands there twice"),
];

#[test]
fn what_compiled_kernels_synchronise_is_needed() {
    for name in COMPILED {
        let Some(right) = compiled(name, 80) else { continue };
        for fault in [Fault::DropBarrier, Fault::DropWarpBarrier, Fault::DropAsyncWait, Fault::DropFence] {
            for site in 0..sites(&right.kernel, fault) {
                let check = check_kernel(&with(fault, site, right.clone()), &Settings::thorough()).unwrap();
                let idle = IDLE.iter().any(|known| (known.0, known.1, known.2) == (name, fault, site));
                let expected = if idle { Verdict::Passed } else { Verdict::Failed };
                assert_eq!(check.verdict, expected, "{name} {fault:?} {site}: {:#?}", check.reasons);
            }
        }
    }
}
