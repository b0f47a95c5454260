//! Tests of checks with a time budget: which CTAs represent the grid, and what the report says about the
//! others.

use std::time::Duration;

use crate::common::small_tiles;
use flashcore_check::gate::{CheckReport, Choice, Sample, Settings, Verdict, check_kernel};
use flashcore_check::launchfile::{Bound, LaunchSpec};
use kernels::forward::mma::QueryHome;
use problem::{DType, Problem};

/// A kernel on a grid of 40 x 5 CTAs. Each thread writes one element of `y`; `body` has the CTA's index in
/// `%r5`, the element's address in `%rd2` and its value in `%r9`.
fn kernel(body: &str) -> Bound {
    kernel_with(body, "")
}

/// The kernel with more tables in its launch file.
fn kernel_with(body: &str, tables: &str) -> Bound {
    let module = format!(
        ".version 7.0
.target sm_80
.address_size 64
.visible .entry k(.param .u64 y)
{{
    .reg .b64 %rd<4>;
    .reg .b32 %r<12>;
    .reg .pred %p<3>;
    ld.param.u64 %rd1, [y];
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %ctaid.y;
    mov.u32 %r3, %nctaid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.u32 %r5, %r2, %r3, %r1;
    mad.lo.u32 %r6, %r5, 32, %r4;
    mul.wide.u32 %rd3, %r6, 4;
    add.u64 %rd2, %rd1, %rd3;
    mov.u32 %r9, 7;
{body}
    st.global.u32 [%rd2], %r9;
    ret;
}}
"
    );
    let launch = "[launch]\ngrid = [40, 5]\nblock = [32]\n[[arg]]\nname = \"y\"\nrole = \"buffer\"\n\
        dtype = \"u32\"\nelements = 6400\n";
    bound(&module, &format!("{launch}{tables}"))
}

fn bound(module: &str, launch: &str) -> Bound {
    let module = ptx::parse(module).unwrap().verify().unwrap();
    launch.parse::<LaunchSpec>().unwrap().bind(module).unwrap()
}

fn within(bound: &Bound, budget: Duration) -> (CheckReport, Sample) {
    let check = check_kernel(bound, &Settings { budget: Some(budget), ..Settings::thorough() }).unwrap();
    let sample = check.sample.clone().unwrap();
    (check, sample)
}

fn chosen(sample: &Sample, choice: Choice) -> &[u64] {
    sample.chosen.iter().find(|(known, _)| *known == choice).map_or(&[], |(_, ctas)| ctas)
}

const LONG: Duration = Duration::from_secs(60);

/// Only CTA (17, 3) executes this instruction.
const RARE: &str = "    setp.eq.u32 %p1, %r5, 137;\n    @%p1 mov.u32 %r9, 8;";

#[test]
fn a_long_budget_searches_and_runs_all_ctas() {
    let (check, sample) = within(&kernel(RARE), LONG);
    assert_eq!(check.verdict, Verdict::Passed, "{:?}", check.reasons);
    assert_eq!(check.coverage.unwrap().percent(), 100.0);
    assert_eq!(
        (sample.ctas, sample.ctas_run, sample.ctas_in_every_run, sample.ctas_searched),
        (200, 200, 200, 200)
    );
    assert_eq!((check.runs as usize, sample.all_ctas), (sample.runs_planned, None));
    assert_eq!(chosen(&sample, Choice::Corner), [0, 39, 160, 199]);
    assert_eq!(chosen(&sample, Choice::Instructions), [137]);
    // One step from the corners, then the CTA after 137.
    assert_eq!(chosen(&sample, Choice::Neighbour), [1, 40, 38, 79, 161, 120, 198, 159, 138]);
    assert!(sample.to_string().starts_with("CTAs or clusters: 4 at corners of the grid, 1 for"), "{sample}");
}

#[test]
fn a_short_budget_runs_two_ctas_and_says_so() {
    // Some milliseconds for each CTA.
    let slow = "    mov.u32 %r10, 0;\nLOOP:\n    add.u32 %r10, %r10, 1;\n    setp.lt.u32 %p2, %r10, 200000;\n    \
        @%p2 bra LOOP;";
    let (check, sample) = within(&kernel(slow), Duration::from_millis(1));
    assert_eq!(check.verdict, Verdict::Passed, "{:?}", check.reasons);
    assert_eq!((check.runs, sample.ctas_run, sample.ctas), (1, 2, 200));
    assert_eq!(chosen(&sample, Choice::Corner), [0, 39]);
    assert!(sample.runs_planned > 1);
}

#[test]
fn a_race_in_the_middle_of_the_grid_is_found() {
    // CTA 136 also writes to the elements of CTA 137.
    let race = "    setp.eq.u32 %p1, %r5, 136;\n    @%p1 st.global.u32 [%rd2 + 128], %r4;";
    let (check, sample) = within(&kernel(race), LONG);
    assert_eq!(check.verdict, Verdict::Failed);
    assert!(check.reasons[0].contains("race"), "{:?}", check.reasons);
    assert!(sample.ctas_run >= 2);
}

#[test]
fn ctas_that_communicate_all_run() {
    let (check, sample) = within(&kernel("    atom.global.add.u32 %r9, [%rd2], 0;\n"), LONG);
    assert_eq!((sample.ctas_run, sample.ctas_in_every_run), (200, 200), "{:?}", check.reasons);
    assert!(sample.all_ctas.unwrap().contains("atomics"));
}

#[test]
fn rows_of_attention_are_judged_as_far_as_they_ran() {
    let problem = Problem::new(1, 3, 1000, 64, DType::F16);
    let bound = small_tiles(&problem, QueryHome::Registers, 2);
    let (check, sample) = within(&bound, Duration::from_millis(50));
    assert_eq!(check.verdict, Verdict::Passed, "{:?} {:?}", check.reasons, check.warnings);
    assert!(sample.ctas_run < sample.ctas, "{sample:?}");
    assert!(check.error.is_some() && check.recorded.is_empty() && check.warnings.is_empty());
}

#[test]
fn reads_of_older_values_are_checked_after_a_short_budget() {
    let Some(text) = filetest::cuda::ptx("relaxed_message") else { return };
    let launch = |entry: &str| {
        format!(
            "[launch]\nentry = \"{entry}\"\ngrid = [2]\nblock = [32]\ncooperative = true\n\
             [[arg]]\nrole = \"buffer\"\ndtype = \"i32\"\nelements = 64\ninit = \"zeros\"\n\
             [[arg]]\nrole = \"buffer\"\ndtype = \"i32\"\nelements = 1\n"
        )
    };
    for (entry, verdict) in [("wrong", Verdict::Failed), ("right", Verdict::Passed)] {
        let (check, sample) = within(&bound(&text, &launch(entry)), Duration::ZERO);
        assert_eq!((check.verdict, check.runs), (verdict, 1), "{entry}: {:?}", check.reasons);
        assert!(sample.runs_planned > 1);
        assert_eq!(check.reasons.iter().any(|reason| reason.contains("weak_order")), entry == "wrong");
    }
}

#[test]
fn a_check_that_judged_no_row_is_incomplete() {
    // Each CTA writes half a row.
    let module = ".version 7.0\n.target sm_80\n.address_size 64\n.visible .entry k(.param .u64 out)\n{\n\
        .reg .b64 %rd<3>;\n.reg .b32 %r<4>;\n.reg .b16 %h<2>;\nld.param.u64 %rd1, [out];\n\
        mov.u32 %r1, %ctaid.x;\nmov.u32 %r2, %tid.x;\nmad.lo.u32 %r3, %r1, 32, %r2;\n\
        mul.wide.u32 %rd2, %r3, 2;\nadd.u64 %rd1, %rd1, %rd2;\nmov.u16 %h1, 0;\n\
        st.global.u16 [%rd1], %h1;\nret;\n}\n";
    let launch = "[problem]\nheads_q = 1\nseq_q = 100\nhead_dim = 64\ndtype = \"f16\"\n\
        [launch]\ngrid = [200]\nblock = [32]\n[[arg]]\nrole = \"out\"\n";
    let (check, sample) = within(&bound(module, launch), Duration::ZERO);
    assert_eq!((check.verdict, sample.ctas_run), (Verdict::Incomplete, 2), "{:?}", check.reasons);
    assert_eq!(check.reasons, ["no row of the output was written completely by the CTAs that ran"]);
    assert!(check.error.is_none());
}

#[test]
fn a_check_that_judged_no_element_is_incomplete() {
    // Only CTA 137 writes.
    let body = "    setp.ne.u32 %p1, %r5, 137;\n    @%p1 ret;";
    let zeros = "[[arg]]\nname = \"x\"\nrole = \"buffer\"\ndtype = \"u32\"\nelements = 6400\ninit = \"zeros\"\n\
        parameter = false\n[reference]\noutput = \"y\"\nbuiltin = \"scan\"\noperation = \"max\"\ninputs = [\"x\"]\n";
    let bound = kernel_with(body, zeros);
    let (check, _) = within(&bound, Duration::ZERO);
    assert_eq!(check.verdict, Verdict::Incomplete, "{:?}", check.reasons);
    assert_eq!(check.reasons, ["no element of y was written by the CTAs that ran"]);
    assert!(!check.is_judged());
    let (check, _) = within(&bound, LONG);
    assert_eq!(check.verdict, Verdict::Failed, "{:?}", check.reasons);
    assert!(check.reasons[0].contains("wrong answer in y: 32 of 32 elements"), "{:?}", check.reasons);
}
