//! Attempts of a kernel without host code to deceive the gate. Each kernel has one warp and a row of 16
//! values per thread.

use check::gate::{CheckReport, Settings, Verdict, check_family, check_kernel};
use check::launchfile::{BufferType, Init, LaunchError, LaunchSpec, Memory, Role};

const LAUNCH: &str = r#"
[problem]
heads_q = 1
seq_q = 32
head_dim = 16
dtype = "f16"
[launch]
grid = [1, 1, 1]
block = [32, 1, 1]
[[arg]]
role = "q"
[[arg]]
role = "k"
[[arg]]
role = "v"
[[arg]]
role = "out"
"#;

/// A module with these globals and this body. `%q`, `%k`, `%v` and `%o` point to the thread's rows.
fn module(globals: &str, body: &str) -> String {
    format!(
        ".version 7.4\n.target sm_80\n.address_size 64\n{globals}\n.visible .entry attention(.param .u64 q, \
         .param .u64 k, .param .u64 v, .param .u64 o)\n{{\n.reg .pred %p<2>;\n.reg .b32 %r<16>;\n\
         .reg .b64 %q, %k, %v, %o, %rd<8>;\nmov.u32 %r0, %tid.x;\nmul.wide.u32 %rd0, %r0, 32;\n\
         ld.param.u64 %q, [q];\nld.param.u64 %k, [k];\nld.param.u64 %v, [v];\nld.param.u64 %o, [o];\n\
         add.s64 %q, %q, %rd0;\nadd.s64 %k, %k, %rd0;\nadd.s64 %v, %v, %rd0;\nadd.s64 %o, %o, %rd0;\n\
         {body}\nret;\n}}\n"
    )
}

/// Copies the thread's row from `from` to the output.
fn copy_row(from: &str) -> String {
    format!(
        "ld.global.v4.u32 {{%r1, %r2, %r3, %r4}}, [{from}];\nld.global.v4.u32 {{%r5, %r6, %r7, %r8}}, [{from}+16];\n\
         st.global.v4.u32 [%o], {{%r1, %r2, %r3, %r4}};\nst.global.v4.u32 [%o+16], {{%r5, %r6, %r7, %r8}};"
    )
}

fn check(text: &str) -> CheckReport {
    let module = ptx::parse(text).unwrap_or_else(|error| panic!("{error}\n{text}"));
    let module = module.verify().unwrap_or_else(|violations| panic!("{violations}"));
    let launch: LaunchSpec = LAUNCH.parse().unwrap();
    check_kernel(&launch.bind(module).unwrap(), &Settings::quick()).unwrap()
}

fn assert_fails(text: &str, reason: &str) {
    let check = check(text);
    assert_eq!(check.verdict, Verdict::Failed);
    assert!(check.reasons.iter().any(|r| r.contains(reason)), "{reason} expected: {:#?}", check.reasons);
}

#[test]
fn constant_answers_are_wrong() {
    let zeros = "mov.b32 %r1, 0;\nst.global.v4.u32 [%o], {%r1, %r1, %r1, %r1};\nst.global.v4.u32 [%o+16], {%r1, %r1, %r1, %r1};";
    assert_fails(&module("", zeros), "wrong answer");
    // This output is correct only where all values are equal.
    assert_fails(&module("", &copy_row("%v")), "wrong answer");
}

#[test]
fn what_was_in_the_output_is_no_answer() {
    assert_fails(&module("", &copy_row("%o")), "uninitialised_read at");
}

#[test]
fn there_is_nothing_to_read_beside_the_inputs() {
    // Reads a reference output that might lie behind the inputs or before them.
    assert_fails(&module("", &copy_row("%q+1024")), "out_of_bounds at");
    assert_fails(&module("", &copy_row("%v+-1024")), "out_of_bounds at");
}

#[test]
fn an_answer_left_out_is_missed() {
    assert_fails(&module("", ""), "unwritten_output at");
}

#[test]
fn without_an_answer_nothing_passes() {
    let module = ptx::parse(&module("", "")).unwrap().verify().unwrap();
    let launch = LAUNCH.replace("role = \"out\"", "role = \"buffer\"\ndtype = \"f16\"\nelements = 512");
    assert_eq!(launch.parse::<LaunchSpec>().unwrap_err(), LaunchError::Unjudged);
    // The gate also rejects such a kernel when it is called directly, and a check without runs.
    let mut bound = LAUNCH.parse::<LaunchSpec>().unwrap().bind(module).unwrap();
    let nothing = check_kernel(&bound, &Settings { runs: Vec::new(), ..Settings::quick() }).unwrap();
    assert_eq!((nothing.verdict, nothing.reasons), (Verdict::Incomplete, vec!["nothing was run".to_owned()]));
    bound.roles[3] = Role::Fill(Memory::new(BufferType::F16, 512, Init::Zeros));
    bound.kernel.buffers[3].access = ptx::Access::ReadWrite;
    let check = check_kernel(&bound, &Settings::quick()).unwrap();
    assert_eq!(check.verdict, Verdict::Incomplete);
    assert!(check.reasons.iter().any(|r| r.contains("nothing was judged")), "{:?}", check.reasons);
    assert_eq!(check_family(&[], &Settings::quick(), |_| None).unwrap().verdict, Verdict::Incomplete);
}

#[test]
fn nothing_is_kept_from_launch_to_launch() {
    let keep = "mov.u64 %rd1, kept;\nadd.s64 %rd1, %rd1, %rd0;\nld.global.u32 %r9, [%q];\nst.global.u32 [%rd1], %r9;";
    let body = format!("{keep}\n{}", copy_row("%v"));
    assert_fails(&module(".global .align 16 .b8 kept[1024];", &body), "keeps something in kept");
    // A counter that is reset is not memory between launches.
    let ticket =
        "mov.u64 %rd1, ticket;\nmov.b32 %r9, 0;\nsetp.eq.u32 %p0, %r0, 0;\n@%p0 st.global.u32 [%rd1], %r9;";
    let body = format!("{ticket}\n{}", copy_row("%v"));
    let check = check(&module(".global .align 4 .u32 ticket;", &body));
    assert!(!check.reasons.iter().any(|r| r.contains("keeps")), "{:?}", check.reasons);
}

#[test]
fn the_inputs_are_left_as_they_are() {
    // Overwrites the inputs with zeros, which would make the next launch's output trivial.
    let spoil = "mov.b32 %r1, 0;\nst.global.u32 [%q], %r1;";
    assert_fails(&module("", &format!("{spoil}\n{}", copy_row("%v"))), "out_of_bounds at");
}

#[test]
fn a_library_is_no_kernel() {
    // A function outside the module: there is no host code and nothing to link with.
    let text = module(".extern .func cublas_gemm();", &format!("call cublas_gemm;\n{}", copy_row("%v")));
    let refused = match ptx::parse(&text) {
        Err(error) => error.to_string(),
        Ok(module) => match module.check() {
            Err(violations) => violations.to_string(),
            Ok(()) => {
                let check = check(&text);
                assert_ne!(check.verdict, Verdict::Passed);
                check.reasons.join("\n")
            }
        },
    };
    assert!(refused.contains("cublas_gemm"), "{refused}");
}
