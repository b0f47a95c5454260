//! Tests of the gate with sliding windows and capped logits: every family passes. Kernels that are off by one
//! key, or that apply the cap in the wrong place, fail.

use flashcore_check::gate::{Settings, Verdict, bind, check_kernel};
use flashcore_check::launchfile::Bound;
use kernels::forward::wgmma::WgmmaPlan;
use kernels::{Arch, Family, Plan};
use problem::{Band, Corner, DType, Layout, PassKind, Problem};
use ptx::{Arg, Kernel};
use tile::Handout;

use crate::common::{SMALL, plain_wgmma};

/// Rows without visible keys, keys that no row sees, and bounds inside a key block.
fn problem(dtype: DType, corner: Corner) -> Problem {
    let band = Band::window(37, 5).aligned(corner);
    Problem::new(1, 4, 100, 64, dtype)
        .with_seq_kv(90, Layout::Bhsd)
        .with_heads_kv(2, Layout::Bshd)
        .with_band(band)
}

fn bounds(problem: &Problem) -> Vec<Bound> {
    let of = |family: Family| {
        let plan = family.default_for(problem, &Arch::SM_90).unwrap();
        bind(&plan, problem, &Arch::SM_90).unwrap()
    };
    Family::of_pass(PassKind::Forward).map(of).collect()
}

fn verdict(bound: &Bound) -> Verdict {
    check_kernel(bound, &Settings::quick()).unwrap().verdict
}

/// The kernel with one argument replaced; `from_end` 0 is the last argument.
fn with_argument(bound: &Bound, from_end: usize, change: impl Fn(&Arg) -> Arg) -> Bound {
    let mut changed = bound.clone();
    let at = changed.kernel.args.len() - 1 - from_end;
    changed.kernel.args[at] = change(&bound.kernel.args[at]);
    changed
}

fn off_by(keys: i32) -> impl Fn(&Arg) -> Arg {
    move |arg| match arg {
        Arg::U32(size) => Arg::U32(size.wrapping_add_signed(keys)),
        other => panic!("{other:?} is no size of a window"),
    }
}

#[test]
fn windows_pass_and_windows_off_by_one_fail() {
    for (dtype, corner) in [(DType::F16, Corner::BottomRight), (DType::Bf16, Corner::TopLeft)] {
        for bound in bounds(&problem(dtype, corner)) {
            assert_eq!(verdict(&bound), Verdict::Passed, "{dtype}");
            for (side, keys) in [(0, 1), (0, -1), (1, 1), (1, -1)] {
                let mutant = with_argument(&bound, side, off_by(keys));
                assert_eq!(verdict(&mutant), Verdict::Failed, "{dtype} side {side} by {keys}");
            }
        }
    }
}

/// Tiles with few blocks, one after the other in a CTA. The consumers skip blocks at the end of a tile, and
/// receive the index of the next tile after that.
#[test]
fn windows_pass_with_few_blocks_in_a_tile() {
    for (before, after, stages) in [(10, 0, 2), (70, 3, 2), (10, 0, 1)] {
        let problem = Problem::new(2, 2, 500, 64, DType::F16).with_band(Band::window(before, after));
        let plan = WgmmaPlan {
            stages,
            queries_ahead: 1,
            block_n: 128,
            handout: Handout::Dynamic,
            ..plain_wgmma(&problem)
        };
        let bound = bind(&Plan::Wgmma(plan), &problem, &SMALL).unwrap();
        let report = check_kernel(&bound, &Settings::quick()).unwrap();
        assert_eq!(report.verdict, Verdict::Passed, "{before} {after} {stages}: {:?}", report.reasons);
    }
}

#[test]
fn caps_pass_and_caps_in_the_wrong_place_fail() {
    let problem = problem(DType::Bf16, Corner::BottomRight).with_softcap(2.0);
    for bound in bounds(&problem) {
        assert_eq!(verdict(&bound), Verdict::Passed);
        // The cap before the scale: tanh(q·k / cap).
        let scale = problem.softmax_scale();
        let unscaled = with_argument(&bound, 0, |arg| match arg {
            Arg::F32(factor) => Arg::F32(factor / scale),
            other => panic!("{other:?} is no factor"),
        });
        assert_eq!(verdict(&unscaled), Verdict::Failed);
        // The cap after the mask: a hidden key would have the weight of tanh(−∞) = −1.
        let mutant = Bound { kernel: hidden_as(&bound.kernel, -1.0), ..bound };
        assert_eq!(verdict(&mutant), Verdict::Failed);
    }
}

/// The kernel with another score than −∞ for hidden keys.
fn hidden_as(kernel: &Kernel, score: f32) -> Kernel {
    let mut kernel = kernel.clone();
    let text = kernel.module.to_string();
    let infinity = format!("0f{:08X}", f32::NEG_INFINITY.to_bits());
    let lines = text.lines().map(|line| match line.contains("selp") {
        true => line.replace(&infinity, &format!("0f{:08X}", score.to_bits())),
        false => line.to_owned(),
    });
    let changed = lines.collect::<Vec<_>>().join("\n");
    assert_ne!(changed, text.trim_end());
    kernel.module = ptx::parse(&changed).unwrap().verify().unwrap();
    kernel
}
