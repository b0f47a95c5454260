//! Tests with kernels that pass on most runs or on most GPUs, and hang or differ on others. Each wrong kernel
//! has a correct counterpart.

use emu::{HazardKind, Placement};
use flashcore_check::gate::{CheckReport, Settings, Verdict, check_kernel};
use flashcore_check::launchfile::{Bound, LaunchSpec};
use predict::machine::H200;
use predict::resources::{ResourceSource, Resources};

fn bound(ptx: &str, launch: &str) -> Bound {
    let module = ptx::parse(ptx).unwrap_or_else(|error| panic!("{error}\n{ptx}"));
    let module = module.verify().unwrap_or_else(|violations| panic!("{violations}"));
    launch.parse::<LaunchSpec>().unwrap().bind(module).unwrap()
}

fn assert_verdict(check: &CheckReport, verdict: Verdict, reason: &str) {
    assert_eq!(check.verdict, verdict, "{:#?}", check.reasons);
    let said = check.reasons.iter().any(|r| r.contains(reason));
    assert!(said || verdict == Verdict::Passed, "{reason} expected: {:#?}", check.reasons);
}

fn filetest(path: &str) -> String {
    std::fs::read_to_string(format!("{}/../../filetests/{path}", env!("CARGO_MANIFEST_DIR"))).unwrap()
}

/// A launch with one buffer.
fn launch(settings: &str, elements: usize, init: &str) -> String {
    format!(
        "[launch]\nentry = \"k\"\n{settings}\n[[arg]]\nrole = \"buffer\"\ndtype = \"u32\"\n\
         elements = {elements}\ninit = \"{init}\"\n"
    )
}

#[test]
fn ctas_that_wait_for_later_ones_need_a_cooperative_launch() {
    let later = filetest("hazard/ctas_wait_for_later_ones.ptx").replace(".target sm_80", ".target sm_90");
    let later = later.replace(".version 7.0", ".version 8.0");
    let check = |ptx: &str, settings: &str| {
        check_kernel(&bound(ptx, &launch(settings, 512, "zeros")), &Settings::quick()).unwrap()
    };
    let few = "grid = [8]\nblock = [1]";
    assert_verdict(&check(&later, few), Verdict::Incomplete, "cooperative");
    assert_verdict(&check(&later, &format!("{few}\ncooperative = true")), Verdict::Passed, "");
    // An H200 holds one such CTA on each of its 132 SMs.
    let many = "grid = [140]\nblock = [1]\ndynamic_shared = 200000\ncooperative = true";
    assert_verdict(&check(&later, many), Verdict::Failed, "the grid has 140, and H200 holds at most 132");
    let earlier = filetest("run/ctas_wait_for_earlier_ones.ptx");
    assert_verdict(&check(&earlier, few), Verdict::Passed, "");
}

#[test]
fn each_launch_that_communicates_starts_with_fresh_buffers() {
    let entry = |name: &str, body: &str| {
        format!(
            ".visible .entry {name}(.param .u64 counter)\n{{\n.reg .pred %p<2>;\n.reg .b32 %r<2>;\n\
             .reg .b64 %rd<2>;\nld.param.u64 %rd1, [counter];\n{body}\nret;\n}}\n"
        )
    };
    let adds = entry("adds", "atom.global.add.u32 %r1, [%rd1], 1;");
    // Both CTAs of `adds` have added before this kernel starts.
    let waits = entry(
        "waits",
        "WAIT:\nld.acquire.gpu.global.u32 %r1, [%rd1];\nsetp.ne.u32 %p1, %r1, 2;\n@%p1 bra WAIT;",
    );
    let ptx = format!(".version 8.0\n.target sm_90\n.address_size 64\n{adds}{waits}");
    let step = |name: &str| {
        format!("[[launch]]\nentry = \"{name}\"\ngrid = [2]\nblock = [1]\nargs = [\"counter\"]\n")
    };
    let buffer = "[[arg]]\nname = \"counter\"\nrole = \"buffer\"\ndtype = \"u32\"\nelements = 1\n\
         init = \"zeros\"\n";
    let launch = format!("{}{}{buffer}", step("adds"), step("waits"));
    let check = check_kernel(&bound(&ptx, &launch), &Settings::quick()).unwrap();
    assert_verdict(&check, Verdict::Passed, "");
}

/// Warp 0 fills the buffer three times, and warps 1 and 2 wait for each filling. `frees` are the warps that
/// release it.
fn readers(count: u32, second_frees: bool) -> String {
    let free = if second_frees { "mbarrier.arrive.shared::cta.b64 _, [empty];" } else { "" };
    let reader = |name: &str, free: &str| {
        format!(
            "{name}:\nmov.u32 %r1, 0;\n{name}_NEXT:\nand.b32 %r2, %r1, 1;\n{name}_FULL:\n\
             mbarrier.try_wait.parity.shared::cta.b64 %p1, [full], %r2;\n@!%p1 bra {name}_FULL;\n{free}\n\
             add.u32 %r1, %r1, 1;\nsetp.lt.u32 %p2, %r1, 3;\n@%p2 bra {name}_NEXT;\nbra DONE;\n"
        )
    };
    format!(
        ".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry k(.param .u64 out)\n{{\n\
         .reg .pred %p<8>;\n.reg .b32 %r<8>;\n.reg .b64 %rd<4>;\n\
         .shared .align 8 .b64 full;\n.shared .align 8 .b64 empty;\n\
         mov.u32 %r0, %tid.x;\nsetp.ne.u32 %p0, %r0, 0;\n@%p0 bra MADE;\n\
         mbarrier.init.shared::cta.b64 [full], 1;\nmbarrier.init.shared::cta.b64 [empty], {count};\n\
         MADE:\nbar.sync 0;\nmov.u32 %r3, %laneid;\nsetp.ne.u32 %p0, %r3, 0;\n@%p0 bra DONE;\n\
         setp.eq.u32 %p0, %r0, 32;\n@%p0 bra A;\nsetp.eq.u32 %p0, %r0, 64;\n@%p0 bra B;\n\
         mov.u32 %r1, 0;\nFILL:\nmbarrier.arrive.shared::cta.b64 _, [full];\nand.b32 %r2, %r1, 1;\n\
         FREE:\nmbarrier.try_wait.parity.shared::cta.b64 %p1, [empty], %r2;\n@!%p1 bra FREE;\n\
         add.u32 %r1, %r1, 1;\nsetp.lt.u32 %p2, %r1, 3;\n@%p2 bra FILL;\n\
         ld.param.u64 %rd0, [out];\nst.global.u32 [%rd0], %r1;\nbra DONE;\n{}{}DONE:\nret;\n}}\n",
        reader("A", "mbarrier.arrive.shared::cta.b64 _, [empty];"),
        reader("B", free),
    )
}

#[test]
fn a_reader_that_nobody_waits_for_misses_a_phase() {
    let launch = launch("grid = [1]\nblock = [96]", 1, "zeros");
    let check = |ptx: String| check_kernel(&bound(&ptx, &launch), &Settings::thorough()).unwrap();
    assert_verdict(&check(readers(1, false)), Verdict::Failed, "deadlock");
    let right = check(readers(2, true));
    assert_verdict(&right, Verdict::Passed, "");
    // Three schedules, and four in which one of the warps or the warpgroup lags.
    assert_eq!(right.runs, 3 + 4);
}

#[test]
fn alignment_that_no_declaration_promises_is_a_note() {
    let ptx = filetest("hazard/vector_in_a_word_array.ptx");
    let bound = bound(&ptx, &launch("grid = [1]\nblock = [32]", 32, "uninitialised"));
    let check = check_kernel(&bound, &Settings::quick()).unwrap();
    assert_verdict(&check, Verdict::Passed, "");
    assert!(check.notes.iter().all(|n| n.kind == HazardKind::UnpromisedAlignment) && !check.notes.is_empty());
    assert!(check.notes[0].message.contains("__align__(16)"), "{}", check.notes[0]);
    let strict = Settings { placement: Placement::Declared, ..Settings::quick() };
    assert_verdict(&check_kernel(&bound, &strict).unwrap(), Verdict::Failed, "__align__(16)");
}

#[test]
fn collectives_may_be_assumed_to_order_memory() {
    let ptx = filetest("hazard/shuffle_orders_no_memory.ptx");
    let bound = bound(&ptx, &launch("grid = [1]\nblock = [32]", 32, "uninitialised"));
    let assumed = Settings { collectives_order: true, ..Settings::quick() };
    assert_verdict(&check_kernel(&bound, &assumed).unwrap(), Verdict::Passed, "");
    let check = check_kernel(&bound, &Settings::quick()).unwrap();
    assert_verdict(&check, Verdict::Failed, "__syncwarp");
    assert!(check.hazards.iter().all(|h| h.kind == HazardKind::WarpOrder), "{:#?}", check.hazards);
}

#[test]
fn a_kernel_without_a_result_is_warned_of() {
    let ptx =
        ".version 7.0\n.target sm_80\n.address_size 64\n.visible .entry k(.param .u64 out)\n{\nret;\n}\n";
    let bound = bound(ptx, &launch("grid = [1]\nblock = [1024]", 4, "uninitialised"));
    let mut check = check_kernel(&bound, &Settings::quick()).unwrap();
    assert_verdict(&check, Verdict::Passed, "");
    let [stores, buffer] = &check.warnings[..] else { panic!("{:?}", check.warnings) };
    assert!(stores.contains("no store") && buffer.contains("uninitialised buffer"), "{:?}", check.warnings);
    // 1024 threads of 130 registers do not fit an SM.
    let (registers, source) = (130, ResourceSource::Ptxas("13.0".into()));
    let resources = Resources { registers, spill_stores: 0, spill_loads: 0, stack: 0, shared: 0, source };
    let launch = bound.kernel.launch;
    check.require_room(&launch, &Resources { registers: 64, ..resources.clone() }, &H200);
    assert_verdict(&check, Verdict::Passed, "");
    check.require_room(&launch, &resources, &H200);
    assert_verdict(&check, Verdict::Incomplete, "H200 cannot run the launch: 130 registers");
}
