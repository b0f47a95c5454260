//! Tests of launch files for kernels of any kind: the arguments that kernels receive, the order in which they
//! run, and the references.

use std::path::Path;

use flashcore_check::files::{self, Tensor};
use flashcore_check::gate::{CheckReport, Settings, Verdict, check_kernel, contents};
use flashcore_check::launchfile::{LaunchError, LaunchSpec};
use flashcore_check::numbers::Numbers;
use host::store::Scratch;
use judge::values::Values;
use ptx::Verified;

const HEAD: &str = ".version 8.0\n.target sm_90\n.address_size 64\n";

fn module(text: &str) -> Verified {
    ptx::parse(&format!("{HEAD}{text}")).unwrap().verify().unwrap()
}

fn check(text: &str, launch: &str) -> CheckReport {
    let bound = launch.parse::<LaunchSpec>().unwrap().bind(module(text)).unwrap();
    check_kernel(&bound, &Settings::quick()).unwrap()
}

fn assert_passed(check: &CheckReport) {
    assert_eq!(check.verdict, Verdict::Passed, "{:?}", check.reasons);
}

fn assert_failed(check: &CheckReport, words: &str) {
    assert_eq!(check.verdict, Verdict::Failed, "{:?}", check.reasons);
    assert!(check.reasons.iter().any(|reason| reason.contains(words)), "{words}: {:?}", check.reasons);
}

const REGISTERS: &str =
    ".reg .b64 %rd<9>;\n.reg .b32 %r<9>;\n.reg .f32 %f<9>;\n.reg .b16 %h<9>;\n.reg .pred %p<3>;\n";

/// An entry that copies `x[tid]` to `y[tid]`, with `edit` between.
fn copy(name: &str, edit: &str) -> String {
    format!(
        ".visible .entry {name}(.param .u64 x, .param .u64 y)\n{{\n{REGISTERS}mov.u32 %r1, %tid.x;\n\
         mul.wide.u32 %rd3, %r1, 4;\nld.param.u64 %rd1, [x];\nld.param.u64 %rd2, [y];\nadd.s64 %rd1, %rd1, %rd3;\n\
         add.s64 %rd2, %rd2, %rd3;\nld.global.f32 %f1, [%rd1];\n{edit}\nst.global.f32 [%rd2], %f1;\nret;\n}}\n"
    )
}

/// A buffer of 32 numbers.
fn buffer(name: &str, dtype: &str, init: &str) -> String {
    format!(
        "[[arg]]\nname = \"{name}\"\nrole = \"buffer\"\ndtype = \"{dtype}\"\nelements = 32\ninit = {init}\n"
    )
}

fn launch(args: &str) -> String {
    format!("[launch]\ngrid = [1]\nblock = [32]\n{args}")
}

/// One launch of [`copy`], whose output is judged.
fn judged(reference: &str) -> String {
    let (x, y) = (buffer("x", "f32", "\"random\""), buffer("y", "f32", "\"uninitialised\""));
    launch(&format!("{x}{y}[reference]\noutput = \"y\"\n{reference}"))
}

const IS_COPY: &str = "builtin = \"scan\"\noperation = \"max\"\ninputs = [\"x\"]\natol = 10.0\n";

#[test]
fn structs_pointers_and_narrow_numbers_arrive() {
    // out[tid] = s.n if s.on, converted from the f16 `h` otherwise, through a table of pointers.
    let kernel = format!(
        ".visible .entry k(.param .align 8 .b8 s[16], .param .u64 table, .param .align 2 .b8 h[2], .param .u8 b)\n{{\n\
         {REGISTERS}mov.u32 %r1, %tid.x;\nmul.wide.u32 %rd3, %r1, 4;\nld.param.u64 %rd1, [table];\n\
         ld.global.u64 %rd2, [%rd1+8];\nadd.s64 %rd2, %rd2, %rd3;\nld.param.f32 %f1, [s+8];\n\
         ld.param.u8 %h1, [s+12];\nsetp.ne.u16 %p1, %h1, 0;\nld.param.b16 %h2, [h];\ncvt.f32.f16 %f2, %h2;\n\
         selp.f32 %f1, %f1, %f2, %p1;\nld.param.u8 %h3, [b];\ncvt.rn.f32.u16 %f3, %h3;\nadd.f32 %f1, %f1, %f3;\n\
         ld.param.u64 %rd4, [s];\nadd.s64 %rd4, %rd4, %rd3;\nld.global.f32 %f4, [%rd4];\nadd.f32 %f1, %f1, %f4;\n\
         st.global.f32 [%rd2], %f1;\nret;\n}}\n"
    );
    let scratch = Scratch::new().unwrap();
    let expected = |value: f32| {
        let bytes: Vec<u8> = (0..32).flat_map(|i| (value + i as f32).to_le_bytes()).collect();
        let file = scratch.path("wanted.npy");
        std::fs::write(
            &file,
            Numbers::of(flashcore_check::launchfile::BufferType::F32, &[32], &bytes).to_npy(),
        )
        .unwrap();
    };
    let file = |on: bool| {
        let (x, y) = (buffer("x", "f32", "\"iota\""), buffer("y", "f32", "\"uninitialised\""));
        let hidden = |text: String| text.replace("role", "parameter = false\nrole");
        launch(&format!(
            "{}{}[[arg]]\nrole = \"struct\"\nfields = [{{ role = \"pointer\", of = \"x\" }}, {{ role = \"f32\", value = 0.25 }}, \
             {{ role = \"bool\", value = {on} }}]\n[[arg]]\nrole = \"pointers\"\nof = [\"null\", \"y\"]\n\
             [[arg]]\nrole = \"f16\"\nvalue = 0.5\n[[arg]]\nrole = \"u8\"\nvalue = 3\n\
             [reference]\noutput = \"y\"\nfile = \"wanted.npy\"\n",
            hidden(x),
            hidden(y)
        ))
    };
    for (on, right) in [(true, 3.25), (false, 3.5)] {
        expected(right);
        let mut spec: LaunchSpec = file(on).parse().unwrap();
        spec.read_files(scratch.path("").as_path()).unwrap();
        let bound = spec.bind(module(&kernel)).unwrap();
        assert_passed(&check_kernel(&bound, &Settings::quick()).unwrap());
        expected(right + 1.0);
        spec.read_files(scratch.path("").as_path()).unwrap();
        let bound = spec.bind(module(&kernel)).unwrap();
        assert_failed(&check_kernel(&bound, &Settings::quick()).unwrap(), "32 of 32 elements");
    }
    std::fs::write(
        scratch.path("wanted.npy"),
        Numbers::of(flashcore_check::launchfile::BufferType::F32, &[2], &[0; 8]).to_npy(),
    )
    .unwrap();
    let error = file(true).parse::<LaunchSpec>().unwrap().read_files(scratch.path("").as_path()).unwrap_err();
    assert!(error.to_string().contains("wanted.npy has 2 elements; expected 32"), "{error}");
    let values = Values::round(problem::DType::F32, &(0..32).map(|i| 3.25 + i as f32).collect::<Vec<f32>>());
    let other = Tensor { values: Values::zeros(problem::DType::F16, 3), shape: vec![3] };
    let tensors = [("y".to_owned(), Tensor { values, shape: vec![4, 8] }), ("z".to_owned(), other)];
    files::save(&scratch.path("wanted.safetensors"), &tensors.into()).unwrap();
    let text = |name: &str| file(true).replace("wanted.npy", name);
    let mut spec: LaunchSpec = text("wanted.safetensors:y").parse().unwrap();
    spec.read_files(scratch.path("").as_path()).unwrap();
    assert_passed(&check_kernel(&spec.bind(module(&kernel)).unwrap(), &Settings::quick()).unwrap());
    let mut spec: LaunchSpec = text("wanted.safetensors").parse().unwrap();
    let error = spec.read_files(scratch.path("").as_path()).unwrap_err().to_string();
    assert!(error.contains("it has the tensors y, z; name one"), "{error}");
}

#[test]
fn constants_have_the_stated_contents() {
    let kernel = format!(
        ".const .align 4 .b8 w[128];\n{}",
        copy(
            "k",
            "cvta.const.u64 %rd5, w;\nadd.s64 %rd5, %rd5, %rd3;\nld.f32 %f2, [%rd5];\nadd.f32 %f1, %f1, %f2;"
        )
    );
    let kernel = kernel.replace("cvta.const.u64 %rd5, w;", "mov.u64 %rd4, w;\ncvta.const.u64 %rd5, %rd4;");
    let file = |constant: &str| {
        let args = format!("{}{}", buffer("x", "f32", "1"), buffer("y", "f32", "\"uninitialised\""));
        let reference = "[reference]\noutput = \"y\"\nbuiltin = \"scan\"\ninputs = [\"x\"]\n";
        launch(&format!("{args}[[constant]]\nname = \"w\"\ndtype = \"f32\"\n{constant}{reference}"))
    };
    // x is 1 everywhere, and the prefix sums of x are 1, 2, 3, …: w must be 0, 1, 2, ….
    assert_passed(&check(&kernel, &file("init = \"iota\"\n")));
    assert_failed(&check(&kernel, &file("values = [0, 1, 2]\n")), "29 of 32 elements");
    let refuse = |constant: &str| {
        file(constant).parse::<LaunchSpec>().unwrap().bind(module(&kernel)).unwrap_err().to_string()
    };
    let long = format!("values = {:?}\n", [1; 33]);
    assert!(
        refuse(&long).contains("'132 bytes' for [[constant]] w: expected at most 128 bytes"),
        "{}",
        refuse(&long)
    );
}

#[test]
fn outputs_are_compared_with_a_built_in() {
    let right = copy("k", "");
    let sums = "builtin = \"scan\"\ninputs = [\"x\"]\n";
    let check_copy = check(&right, &judged(sums));
    assert_failed(&check_copy, "wrong answer in y");
    assert!(check_copy.is_judged() && check_copy.judgements[0].by == "the built-in scan");
    assert_passed(&check(&right, &judged(IS_COPY)));
    let json = check_copy.json(&serde_json::json!([]));
    assert_eq!((&json["judged"], &json["judgements"][0]["output"]), (&true.into(), &"y".into()));
    // The message says that an element was not written.
    let partial = copy("k", "setp.eq.u32 %p1, %r1, 7;\n@%p1 ret;");
    assert_failed(&check(&partial, &judged(IS_COPY)), "1 of 32 elements of y were never written");
}

#[test]
fn outputs_are_compared_with_another_kernel() {
    let spec: LaunchSpec = judged("kernel = \"other.ptx\"\n").parse().unwrap();
    assert_eq!(spec.reference_kernels().collect::<Vec<_>>(), ["other.ptx"]);
    let run = |kernel: &str, other: &str| {
        let bound = spec.bind_with(module(kernel), &[module(other)], Path::new(".")).unwrap();
        check_kernel(&bound, &Settings::quick()).unwrap()
    };
    let (plain, doubled) = (copy("k", ""), copy("other", "add.f32 %f1, %f1, %f1;"));
    assert_passed(&run(&plain, &copy("other", "add.f32 %f1, %f1, 0f00000000;")));
    assert_failed(&run(&plain, &doubled), "the kernel in other.ptx says");
    // A reference kernel that is itself wrong does not judge.
    let beyond = run(&plain, &copy("other", "ld.global.f32 %f2, [%rd1+128];"));
    assert_eq!(beyond.verdict, Verdict::Incomplete, "{:?}", beyond.reasons);
    assert!(
        beyond.reasons[0].contains("the reference kernel other.ptx failed: out_of_bounds"),
        "{:?}",
        beyond.reasons
    );
}

/// Traps unless the launch is cooperative, as `grid.sync()` does.
const NEEDS_COOPERATIVE: &str = "mov.b32 %r2, %envreg1;\nmov.b32 %r3, %envreg2;\nor.b32 %r2, %r2, %r3;\nsetp.eq.u32 %p2, %r2, 0;\n@%p2 trap;";

#[test]
fn a_reference_kernel_is_cooperative_where_the_launch_is() {
    let run = |launch: &str, reference: &str| {
        let text = judged(&format!("kernel = \"other.ptx\"\n{reference}"));
        let spec: LaunchSpec =
            text.replacen("[launch]\n", &format!("[launch]\n{launch}"), 1).parse().unwrap();
        let other = module(&copy("other", NEEDS_COOPERATIVE));
        let bound = spec.bind_with(module(&copy("k", "")), &[other], Path::new(".")).unwrap();
        check_kernel(&bound, &Settings::quick()).unwrap()
    };
    assert_passed(&run("cooperative = true\n", ""));
    assert_passed(&run("", "cooperative = true\n"));
    for (launch, reference) in [("", ""), ("cooperative = true\n", "cooperative = false\n")] {
        let check = run(launch, reference);
        assert_eq!(check.verdict, Verdict::Incomplete, "{:?}", check.reasons);
        assert!(check.reasons[0].contains("failed: trap"), "{:?}", check.reasons);
    }
}

#[test]
fn a_cooperative_grid_that_no_gpu_holds_is_refused_before_it_runs() {
    let args = format!("{}{}", buffer("x", "f32", "1"), buffer("y", "f32", "0"));
    let large = format!("[launch]\ngrid = [4000]\nblock = [1024]\ncooperative = true\n{args}");
    let check = check(&copy("k", ""), &large);
    assert_failed(&check, "must be resident together; the grid has 4000, and");
    assert_eq!(check.runs, 0);
}

/// A flag is polled by CTA 0 and set by the CTA `writer`, in a grid of `ctas`.
fn polls(writer: u32, ctas: u32) -> CheckReport {
    let kernel = format!(
        ".visible .entry k(.param .u64 y)\n{{\n{REGISTERS}ld.param.u64 %rd1, [y];\nmov.u32 %r1, %ctaid.x;\n\
         setp.ne.u32 %p1, %r1, {writer};\n@%p1 bra READER;\nmov.u32 %r2, 1;\n\
         st.release.gpu.global.u32 [%rd1], %r2;\nREADER:\nsetp.ne.u32 %p1, %r1, 0;\n@%p1 ret;\n\
         WAIT:\nld.acquire.gpu.global.u32 %r3, [%rd1];\nsetp.eq.u32 %p1, %r3, 0;\n@%p1 bra WAIT;\n\
         st.global.u32 [%rd1+4], %r3;\nret;\n}}\n"
    );
    let file =
        format!("[launch]\ngrid = [{ctas}]\nblock = [1]\ncooperative = true\n{}", buffer("y", "u32", "0"));
    check(&kernel, &file)
}

/// The answer of the poll passes through shared memory, so the loop does not only read.
#[test]
fn a_spin_with_barriers_needs_its_ctas_resident() {
    let kernel = format!(
        ".visible .entry k(.param .u64 y)\n{{\n{REGISTERS}.shared .align 4 .b32 answer;\n\
         ld.param.u64 %rd1, [y];\nmov.u32 %r1, %ctaid.x;\nsetp.eq.u32 %p1, %r1, 0;\n@%p1 bra WAIT;\n\
         mov.u32 %r2, 1;\nst.release.gpu.global.u32 [%rd1], %r2;\nret;\n\
         WAIT:\natom.acq_rel.gpu.global.cas.b32 %r3, [%rd1], 1, 1;\nst.shared.u32 [answer], %r3;\nbar.sync 0;\n\
         ld.shared.u32 %r2, [answer];\nsetp.eq.u32 %p1, %r2, 0;\n@%p1 bra WAIT;\n\
         st.global.u32 [%rd1+4], %r3;\nret;\n}}\n"
    );
    let run = |cooperative: &str| {
        check(
            &kernel,
            &format!("[launch]\ngrid = [2]\nblock = [1]\n{cooperative}{}", buffer("y", "u32", "0")),
        )
    };
    let plain = run("");
    assert_eq!(plain.verdict, Verdict::Incomplete, "{:?}", plain.reasons);
    let reason = &plain.reasons[0];
    assert!(reason.contains("CTAs wait for later CTAs") && reason.contains("cooperative = true"), "{reason}");
    assert_passed(&run("cooperative = true\n"));
}

#[test]
fn a_poll_that_never_waited_is_a_warning() {
    let idle = |check: &CheckReport| {
        check.warnings.iter().any(|w| w.contains("the poll at line 21 never had to wait"))
    };
    let (alone, waits) = (polls(0, 1), polls(1, 2));
    assert_passed(&alone);
    assert!(idle(&alone), "{:?}", alone.warnings);
    assert_eq!(alone.coverage.unwrap().missing(), [(23, 23)]);
    assert_passed(&waits);
    assert!(!idle(&waits), "{:?}", waits.warnings);
    assert_eq!(waits.coverage.unwrap().missing(), []);
    // CTA 1 sets the flag before CTA 0 looks, unless CTA 0 starts first.
    let late = polls(11, 12);
    assert_passed(&late);
    assert!(!idle(&late), "{:?}", late.warnings);
}

#[test]
fn integers_of_64_bits_are_compared_exactly() {
    // f64 has 2^60, but not 2^60 + 1.
    let stores = |name: &str, n: u64| {
        format!(
            ".visible .entry {name}(.param .u64 y)\n{{\n{REGISTERS}ld.param.u64 %rd1, [y];\nmov.u64 %rd2, {n};\n\
             st.global.u64 [%rd1], %rd2;\nret;\n}}\n"
        )
    };
    let file = |reference: &str| {
        let y = "[[arg]]\nname = \"y\"\nrole = \"buffer\"\ndtype = \"u64\"\nelements = 1\ninit = \"zeros\"\n";
        format!("[launch]\ngrid = [1]\nblock = [1]\n{y}[reference]\noutput = \"y\"\n{reference}\n")
    };
    let scratch = Scratch::new().unwrap();
    let (odd, even) = ((1u64 << 60) + 1, 1u64 << 60);
    let wanted = Numbers::of(flashcore_check::launchfile::BufferType::U64, &[1], &odd.to_le_bytes());
    std::fs::write(scratch.path("wanted.npy"), wanted.to_npy()).unwrap();
    for reference in ["kernel = \"other.ptx\"", "file = \"wanted.npy\""] {
        let mut spec: LaunchSpec = file(reference).parse().unwrap();
        spec.read_files(scratch.path("").as_path()).unwrap();
        let run = |n| {
            let others: Vec<_> = spec.reference_kernels().map(|_| module(&stores("other", odd))).collect();
            let bound = spec.bind_with(module(&stores("k", n)), &others, Path::new(".")).unwrap();
            check_kernel(&bound, &Settings::quick()).unwrap()
        };
        assert_passed(&run(odd));
        assert_failed(&run(even), "[0] is 1152921504606846976,");
    }
}

#[test]
fn launches_follow_each_other_on_the_same_buffers() {
    let kernels =
        format!("{}{}", copy("first", "add.f32 %f1, %f1, %f1;"), copy("second", "sub.f32 %f1, %f1, %f1;"));
    let file = |second: &str| {
        let buffers = ["x", "t", "y"]
            .map(|name| buffer(name, "f32", if name == "x" { "3" } else { "\"uninitialised\"" }));
        format!(
            "[[launch]]\nentry = \"first\"\ngrid = [1]\nblock = [32]\nargs = [\"x\", \"t\"]\n[[launch]]\nentry = \"second\"\n\
             grid = [1]\nblock = [32]\nargs = {second}\n{}[reference]\noutput = \"y\"\nbuiltin = \"reduce\"\n\
             operation = \"min\"\ninputs = [\"zeros\"]\n[[arg]]\nname = \"zeros\"\nparameter = false\nrole = \"buffer\"\n\
             dtype = \"f32\"\nelements = 32\ninit = \"zeros\"\n",
            buffers.concat()
        )
    };
    let passed = check(&kernels, &file("[\"t\", \"y\"]"));
    assert_passed(&passed);
    let (executed, all) = passed.coverage.unwrap().counts();
    assert_eq!(executed, all, "both entries count");
    // t is never written.
    let swapped = file("[\"t\", \"y\"]").replacen("[\"x\", \"t\"]", "[\"x\", \"y\"]", 1);
    assert_failed(&check(&kernels, &swapped), "(launch 2 of 2, second)");
    let missing = file("[\"t\"]").parse::<LaunchSpec>().unwrap().bind(module(&kernels)).unwrap_err();
    assert!(matches!(missing, LaunchError::Count { args: 1, params: 2, .. }), "{missing}");
}

#[test]
fn outputs_of_a_problem_may_have_contents_before() {
    // The kernel adds to `out`, so `out` must start with zeros.
    let file = |init: &str| {
        format!(
            "[problem]\nheads_q = 1\nseq_q = 1\nseq_kv = 1\nhead_dim = 32\ndtype = \"f32\"\n[launch]\ngrid = [1]\nblock = [32]\n\
             [[arg]]\nrole = \"v\"\n[[arg]]\nrole = \"out\"\n{init}"
        )
    };
    let adds = copy("k", "ld.global.f32 %f2, [%rd2];\nadd.f32 %f1, %f1, %f2;");
    assert_passed(&check(&adds, &file("init = \"zeros\"\n")));
    assert_failed(&check(&adds, &file("init = 1\n")), "wrong answer");
    assert_failed(&check(&adds, &file("")), "out");
}

#[test]
fn the_lse_may_have_its_rows_before_its_heads() {
    // Two heads, two rows, one key: each LSE is the logit q·k. Thread i writes the LSE of row i/2, head i%2.
    let kernel = |place: &str| {
        format!(
            ".visible .entry k(.param .u64 q, .param .u64 k, .param .u64 v, .param .u64 out, .param .u64 lse)\n{{\n{REGISTERS}\
             mov.u32 %r1, %tid.x;\nshr.u32 %r2, %r1, 1;\nand.b32 %r3, %r1, 1;\nmad.lo.u32 %r4, %r3, 2, %r2;\n\
             mul.wide.u32 %rd1, %r4, 4;\nmul.wide.u32 %rd2, %r3, 4;\nld.param.u64 %rd3, [q];\nld.param.u64 %rd4, [k];\n\
             ld.param.u64 %rd5, [v];\nld.param.u64 %rd6, [out];\nld.param.u64 %rd7, [lse];\nadd.s64 %rd3, %rd3, %rd1;\n\
             add.s64 %rd4, %rd4, %rd2;\nadd.s64 %rd5, %rd5, %rd2;\nadd.s64 %rd6, %rd6, %rd1;\nld.global.f32 %f1, [%rd3];\n\
             ld.global.f32 %f2, [%rd4];\nmul.f32 %f3, %f1, %f2;\nld.global.f32 %f4, [%rd5];\nst.global.f32 [%rd6], %f4;\n\
             mul.wide.u32 %rd8, {place}, 4;\nadd.s64 %rd7, %rd7, %rd8;\nst.global.f32 [%rd7], %f3;\nret;\n}}\n"
        )
    };
    let file = |layout: &str| {
        format!(
            "[problem]\nheads_q = 2\nseq_q = 2\nseq_kv = 1\nhead_dim = 1\ndtype = \"f32\"\nscale = 1.0\n[launch]\ngrid = [1]\n\
             block = [4]\n[[arg]]\nrole = \"q\"\n[[arg]]\nrole = \"k\"\n[[arg]]\nrole = \"v\"\n[[arg]]\nrole = \"out\"\n\
             [[arg]]\nrole = \"lse\"\nlayout = \"{layout}\"\n"
        )
    };
    assert_passed(&check(&kernel("%r1"), &file("bshd")));
    assert_passed(&check(&kernel("%r4"), &file("bhsd")));
    assert_failed(&check(&kernel("%r1"), &file("bhsd")), "LSE");
}

#[test]
fn a_tensor_map_may_lie_in_global_memory() {
    let Some(by_value) = filetest::corpus("cuda_hopper_copy_sm90a") else { return };
    let launch = std::fs::read_to_string("../../filetests/corpus/cuda_hopper_copy.toml").unwrap();
    let param = by_value.lines().find(|line| line.contains(".param .align 64 .b8")).unwrap().to_owned();
    let name = param.split("b8 ").nth(1).unwrap().split('[').next().unwrap().to_owned();
    // The parameter becomes an address: it holds the address of the tensor map, no longer the map itself.
    let wide = format!(".param .u64 {name}{}", if param.trim_end().ends_with(',') { "," } else { "" });
    let moves: Vec<&str> =
        by_value.lines().filter(|line| line.contains("mov.") && line.contains(&name)).collect();
    assert!(!moves.is_empty(), "{by_value}");
    let mut text = by_value.replace(&param, &wide);
    for line in moves {
        let register = line.split_whitespace().nth(1).unwrap().trim_end_matches(',');
        text = text.replace(line, &format!("ld.param.u64 {register}, [{name}];"));
        let converted =
            |line: &&str| line.contains("cvta.param") && line.trim_end().ends_with(&format!("{register};"));
        let generic: Vec<String> = by_value.lines().filter(converted).map(str::to_owned).collect();
        generic.iter().for_each(|line| text = text.replace(line, &line.replace("cvta.param.u64", "mov.u64")));
    }
    let first = launch.find("role = \"tensor_map\"").unwrap();
    let in_memory = format!("{}memory = \"global\", {}", &launch[..first], &launch[first..]);
    let module = ptx::parse(&text).unwrap().verify().unwrap_or_else(|error| panic!("{error}\n{text}"));
    let bound = in_memory.parse::<LaunchSpec>().unwrap().bind(module).unwrap();
    let check = check_kernel(&bound, &Settings::quick()).unwrap();
    assert_passed(&check);
    assert!(check.coverage.unwrap().percent() > 50.0);
}

#[test]
fn a_tensor_map_may_be_a_field_of_a_struct() {
    let Some(by_value) = filetest::corpus("cuda_hopper_copy_sm90a") else { return };
    let launch = std::fs::read_to_string("../../filetests/corpus/cuda_hopper_copy.toml").unwrap();
    let param = by_value.lines().find(|line| line.contains(".param .align 64 .b8")).unwrap();
    let name = param.split("b8 ").nth(1).unwrap().split('[').next().unwrap();
    // The struct has a number before the map.
    let wide = param.replace("[128]", "[192]");
    let mut text = by_value.replace(param, &wide);
    for line in by_value.lines().filter(|line| line.contains("mov.") && line.contains(name)) {
        text = text.replace(line, &line.replace(name, &format!("{name}+64")));
    }
    let map = launch.lines().find(|line| line.contains("role = \"tensor_map\"")).unwrap();
    let of_struct = "    { role = \"struct\", fields = [{ role = \"i32\", value = 7 }, { role = \"tensor_map\", of = \"map\" }] },\n";
    let named =
        map.replace("role = \"tensor_map\"", "role = \"tensor_map\", name = \"map\", parameter = false");
    let spec = launch.replace(map, &format!("{of_struct}{named}"));
    let module = ptx::parse(&text).unwrap().verify().unwrap_or_else(|error| panic!("{error}\n{text}"));
    let bound =
        spec.parse::<LaunchSpec>().unwrap_or_else(|error| panic!("{error}\n{spec}")).bind(module).unwrap();
    let check = check_kernel(&bound, &Settings::quick()).unwrap();
    assert_passed(&check);
    assert!(check.coverage.unwrap().percent() > 50.0);
}

#[test]
fn any_seed_fills_the_buffers() {
    let bound = judged(IS_COPY).parse::<LaunchSpec>().unwrap().bind(module(&copy("k", ""))).unwrap();
    assert_eq!(contents(&bound, u64::MAX).len(), 2);
}
