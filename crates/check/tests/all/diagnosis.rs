//! Tests that findings are weighted by their time, not only by counters.

use flashcore_check::diagnose::Finding;
use flashcore_check::diagnose::{Evidence, Executed};
use flashcore_check::gate::{Settings, Verdict, check_kernel};
use flashcore_check::launchfile::LaunchSpec;
use flashcore_check::study::{RecordError, record, sketch, study};
use kernels::Symptom;
use predict::{Cause, machine};

/// A thousand threads that walk private arrays of `words` words, with 24 multiply-adds per access.
fn private_arrays(words: u32) -> Finding {
    let text = format!(
        ".version 7.0\n.target sm_80\n.address_size 64\n.visible .entry k(.param .u64 out)\n{{\n\
         .reg .pred %p;\n.reg .b32 %i;\n.reg .b64 %at, %a, %to;\n.reg .f32 %v, %s;\n\
         .local .align 16 .b8 array[{bytes}];\n\
         mov.u64 %at, array;\nmov.u32 %i, 0;\nmov.f32 %s, 0f00000000;\nmov.u64 %a, %at;\n\
         FILL:\nst.local.f32 [%a], %s;\nadd.u64 %a, %a, 4;\nadd.u32 %i, %i, 1;\n\
         setp.lt.u32 %p, %i, {words};\n@%p bra FILL;\nmov.u32 %i, 0;\nmov.u64 %a, %at;\n\
         SUM:\nld.local.f32 %v, [%a];\n{multiply_adds}\
         add.u64 %a, %a, 4;\nadd.u32 %i, %i, 1;\nsetp.lt.u32 %p, %i, {words};\n@%p bra SUM;\n\
         ld.param.u64 %to, [out];\nmov.u32 %i, %tid.x;\n\
         mul.wide.u32 %a, %i, 4;\nadd.u64 %to, %to, %a;\n\
         st.global.f32 [%to], %s;\nret;\n}}\n",
        bytes = 4 * words,
        multiply_adds = "fma.rn.f32 %s, %s, %s, %v;\n".repeat(24),
    );
    let launch = "[launch]\ngrid = [1]\nblock = [1024]\n[[arg]]\nrole = \"buffer\"\ndtype = \"f32\"\nelements = 1024\n\
                  init = \"zeros\"\n";
    let module = ptx::parse(&text).unwrap().verify().unwrap();
    let bound = launch.parse::<LaunchSpec>().unwrap().bind(module).unwrap();
    let study =
        study(bound, Some(text.into()), &Settings::quick().first_run(), &[machine::L4], None).unwrap();
    let finding = study.findings.iter().find(|f| f.name == Symptom::LocalMemory).cloned();
    finding.unwrap_or_else(|| panic!("{:?}", study.findings))
}

/// An array that fits into L1 costs its instructions. A larger array also costs the wait for L2.
#[test]
fn local_memory_weighs_its_misses() {
    let (held, missed) = (private_arrays(16), private_arrays(256));
    assert!(held.share < 0.3, "{held:?}");
    assert!(missed.share > 2.0 * held.share && missed.share > 0.4, "{missed:?} against {held:?}");
    assert!(held.evidence.contains(" 0 % of what L1 asks of L2"), "{held:?}");
}

/// Each thread doubles 16 numbers, one after the other. Warps wait for DRAM, but DRAM is busy: earlier copies
/// or wider accesses would gain little.
#[test]
fn a_wait_for_a_busy_unit_has_no_gain() {
    let text = ".version 7.0\n.target sm_80\n.address_size 64\n\
                .visible .entry k(.param .u64 from, .param .u64 to)\n{\n.reg .pred %p;\n\
                .reg .b32 %i, %c, %t;\n.reg .b64 %at, %from, %to;\n.reg .f32 %x;\n\
                mov.u32 %c, %ctaid.x;\nmov.u32 %t, %tid.x;\nmad.lo.u32 %i, %c, 2048, %t;\n\
                mul.wide.u32 %at, %i, 4;\nld.param.u64 %from, [from];\nld.param.u64 %to, [to];\n\
                add.u64 %from, %from, %at;\nadd.u64 %to, %to, %at;\nmov.u32 %i, 0;\n\
                NEXT:\nld.global.f32 %x, [%from];\nadd.f32 %x, %x, %x;\nst.global.f32 [%to], %x;\n\
                add.u64 %from, %from, 512;\nadd.u64 %to, %to, 512;\nadd.u32 %i, %i, 1;\n\
                setp.lt.u32 %p, %i, 16;\n@%p bra NEXT;\nret;\n}\n";
    let buffer = "[[arg]]\nrole = \"buffer\"\ndtype = \"f32\"\nelements = 4194304\ninit = \"zeros\"\n";
    let launch = format!("[launch]\ngrid = [2048]\nblock = [128]\n{buffer}{buffer}");
    let module = ptx::parse(text).unwrap().verify().unwrap();
    let bound = launch.parse::<LaunchSpec>().unwrap().bind(module).unwrap();
    let study =
        study(bound, Some(text.to_owned().into()), &Settings::quick().first_run(), &[machine::H200], None)
            .unwrap();
    let prediction = study.predictions[0].as_ref().unwrap();
    assert!(prediction.utilisation.dram > 0.9 && prediction.share(Cause::Dram) > 0.5, "{prediction:?}");
    assert!(study.findings.iter().all(|f| f.expected_gain < 1.15), "{:?}", study.findings);
}

/// The next run could not finish in the budget either, so only one run is made.
#[test]
fn a_budget_is_spent_once() {
    let text =
        ".version 7.0\n.target sm_80\n.address_size 64\n.visible .entry k()\n{\nAGAIN:\nbra AGAIN;\n}\n";
    let spec = "[launch]\ngrid = [1]\nblock = [64]\n".parse::<LaunchSpec>().unwrap();
    let bound = spec.bind(ptx::parse(text).unwrap().verify().unwrap()).unwrap();
    let settings = Settings { step_limit: 100_000, ..Settings::thorough() };
    let check = check_kernel(&bound, &settings).unwrap();
    assert_eq!((check.verdict, check.runs, check.reasons.len()), (Verdict::Incomplete, 0, 1));
}

/// Threads that wait forever have no time. What they did before would be forecast as the kernel's time.
#[test]
fn a_kernel_that_does_not_end_is_not_recorded() {
    let text =
        ".version 7.0\n.target sm_80\n.address_size 64\n.visible .entry k()\n{\nbar.sync 1, 96;\nret;\n}\n";
    let spec = "[launch]\ngrid = [1]\nblock = [64]\n".parse::<LaunchSpec>().unwrap();
    let bound = spec.bind(ptx::parse(text).unwrap().verify().unwrap()).unwrap();
    for recorded in [record(&bound, 1), sketch(&bound, 1)] {
        let Err(RecordError::Deadlock(wait)) = recorded else { panic!("{recorded:?}") };
        assert!(wait.starts_with("deadlock at line 6"), "{wait}");
    }
}

/// The lane that loads the tiles of a warp-specialised kernel is not a serial section, and the consumers are
/// not idle warps.
#[test]
fn a_producer_is_no_serial_section() {
    let Some(text) = filetest::cuda::ptx("warp_specialised") else { return };
    let source = std::fs::read_to_string(filetest::cuda::folder().join("warp_specialised.cu")).unwrap();
    let spec: String =
        source.lines().filter_map(|l| l.strip_prefix("//! ")).map(|l| l.to_owned() + "\n").collect();
    let spec = spec.replace("[launch]", "[launch]\nentry = \"right\"");
    let bound =
        spec.parse::<LaunchSpec>().unwrap().bind(ptx::parse(&text).unwrap().verify().unwrap()).unwrap();
    let study =
        study(bound, Some(text.into()), &Settings::quick().first_run(), &[machine::H200], None).unwrap();
    let (kernel, recorded) = (&study.bound.kernel, &study.check.recorded[0]);
    let evidence = Evidence::new(kernel, &recorded.counters, &recorded.traces, study.prediction(), None);
    let copies = |e: &&Executed| matches!(e.inst.op, ptx::Op::CpAsyncBulk(_));
    assert!(evidence.executed.iter().find(copies).unwrap().feeds);
    assert!(evidence.executed.iter().any(|e| !e.feeds && e.counter.flop > 0));
    assert_eq!((evidence.working_warps, evidence.counters.warps), (4, 5));
    let names: Vec<&str> = study.findings.iter().map(|f| f.name.name()).collect();
    let wrong = ["serial section", "serial reduction", "idle warps", "idle lanes", "small grid"];
    assert!(names.iter().all(|name| !wrong.contains(name)), "{:?}", study.findings);
}

/// The finding about tensor cores of a kernel whose threads run a loop 64 times.
fn tensor_cores(body: &str) -> Option<Finding> {
    let text = format!(
        ".version 7.0\n.target sm_80\n.address_size 64\n\
         .visible .entry k(.param .u64 from, .param .u64 to)\n{{\n.reg .pred %p;\n\
         .reg .b32 %i, %t;\n.reg .b64 %at, %from, %to;\n.reg .f32 %x, %y, %n, %e, %l;\n\
         mov.u32 %t, %tid.x;\nmul.wide.u32 %at, %t, 4;\nld.param.u64 %from, [from];\nld.param.u64 %to, [to];\n\
         add.u64 %from, %from, %at;\nadd.u64 %to, %to, %at;\nmov.u32 %i, 0;\nmov.f32 %l, 0f00000000;\n\
         NEXT:\nld.global.f32 %x, [%from];\nld.global.f32 %y, [%from+128];\n{body}\
         add.u64 %from, %from, 256;\nadd.u32 %i, %i, 1;\n\
         setp.lt.u32 %p, %i, 64;\n@%p bra NEXT;\nst.global.f32 [%to], %l;\nret;\n}}\n"
    );
    let buffer = |elements| {
        format!("[[arg]]\nrole = \"buffer\"\ndtype = \"f32\"\nelements = {elements}\ninit = \"zeros\"\n")
    };
    let launch = format!("[launch]\ngrid = [1]\nblock = [32]\n{}{}", buffer(4096), buffer(32));
    let module = ptx::parse(&text).unwrap().verify().unwrap();
    let bound = launch.parse::<LaunchSpec>().unwrap().bind(module).unwrap();
    let study =
        study(bound, Some(text.into()), &Settings::quick().first_run(), &[machine::L4], None).unwrap();
    study.findings.into_iter().find(|f| f.name == Symptom::TensorCoresUnused)
}

/// Tensor cores are recommended for products that are summed over a loop, not for the multiply-adds of an
/// exponential.
#[test]
fn tensor_cores_are_for_sums_of_products() {
    // As NVRTC compiles `expf`: a range reduction with constants in registers, and a power of two made of
    // bits.
    let exponential = "mov.f32 %n, 0f3BBB989D;\nfma.rn.f32 %e, %x, %n, 0f3F000000;\ncvt.sat.f32.f32 %e, %e;\n\
                       mov.f32 %n, 0f437C0000;\nfma.rm.f32 %n, %e, %n, 0f4B400001;\n\
                       add.f32 %e, %n, 0fCB40007F;\nneg.f32 %e, %e;\nfma.rn.f32 %e, %x, 0f3FB8AA3B, %e;\n\
                       fma.rn.f32 %e, %x, 0f32A57060, %e;\nmov.b32 %t, %n;\nshl.b32 %t, %t, 23;\n\
                       mov.b32 %n, %t;\nex2.approx.ftz.f32 %e, %e;\n";
    for sum in ["fma.rn.f32 %l, %e, %n, %l;\n", "mul.f32 %e, %e, %n;\nfma.rn.f32 %l, %l, %y, %e;\n"] {
        assert_eq!(tensor_cores(&format!("{exponential}{sum}")), None, "{sum}");
    }
    assert_eq!(tensor_cores("fma.rn.f32 %l, %x, %x, %l;\n"), None, "a sum of squares");
    assert_eq!(tensor_cores("fma.rn.f32 %l, %l, %x, 0f3F800000;\n"), None, "a polynomial");
    for product in [
        "fma.rn.f32 %l, %x, %y, %l;\n",
        "fma.rn.f32 %e, %x, %y, %l;\nmov.f32 %l, %e;\n",
        "mul.f32 %n, %x, %y;\nfma.rn.f32 %e, %y, %x, %n;\nadd.f32 %l, %l, %e;\n",
        "mul.f32 %l, %l, %y;\nfma.rn.f32 %l, %x, %y, %l;\n",
    ] {
        let finding = tensor_cores(product).unwrap_or_else(|| panic!("no finding: {product}"));
        assert!(finding.cure.starts_with("compute matrix products with mma.sync"), "{finding:?}");
    }
}
