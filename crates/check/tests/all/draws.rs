//! Right kernels pass on many draws: bounds that are too tight would reject right candidates of a search.

use emu::{Checks, Emulator, Options};
use flashcore_check::gate::{Feed, bind, trial};
use judge::inputs::Style;
use kernels::{Arch, Plan};
use problem::{Band, DType, DTypes, Layout, Problem};

const SEEDS: u64 = 2;

fn problems(dtypes: DTypes) -> Vec<Problem> {
    vec![
        Problem::new(1, 1, 40, 64, dtypes).with_seq_kv(70, Layout::Bhsd).with_lse(true),
        Problem::new(1, 2, 33, 128, dtypes).with_band(Band::CAUSAL),
        Problem::new(1, 4, 1, 64, dtypes).with_heads_kv(2, Layout::Bhsd).with_seq_kv(130, Layout::Bhsd),
    ]
}

/// The failures of a default plan on all draws.
fn refused(problem: &Problem, arch: &Arch) -> Vec<String> {
    let plan = Plan::default_for(problem, arch).unwrap();
    let bound = bind(&plan, problem, arch).unwrap();
    let takes = |style: Style| match problem.dtypes.q {
        // 3xTF32 splits an infinity into two numbers whose difference is NaN.
        DType::F32 => style.is_finite(),
        // Beside a weight of 1, e4m3 has no number for weights of 2^-18.
        DType::E4m3 => style != Style::Spike,
        _ => true,
    };
    let draws = Style::ALL.into_iter().filter(|&style| takes(style));
    let draws = draws.flat_map(|style| (0..SEEDS).map(move |seed| (style, seed)));
    let feeds = draws.filter_map(|(style, seed)| Some(((style, seed), Feed::draw(&bound, style, seed)?)));
    let of_feed = |(draw, feed): (_, Feed)| {
        let checks = Checks { races: false, uninitialised: false, unwritten: false };
        let mut machine = Emulator::new(Options { checks, ..Options::default() });
        let references = feed.references(&bound).unwrap();
        let reasons = trial(&mut machine, &bound, &feed, references.as_deref()).unwrap().reasons;
        reasons.into_iter().map(|reason| format!("{draw:?} {plan:?}: {reason}")).collect::<Vec<_>>()
    };
    feeds.flat_map(of_feed).collect()
}

#[test]
fn default_plans_pass_on_every_draw() {
    for dtypes in ["f32", "tf32", "f16", "bf16", "e4m3"].map(|text| text.parse().unwrap()) {
        for problem in problems(dtypes) {
            for arch in [Arch::SM_80, Arch::SM_90]
                .into_iter()
                .filter(|arch| arch.multiplies_fp8() || !dtypes.has_fp8())
            {
                assert_eq!(refused(&problem, &arch), [""; 0], "{problem:?}");
            }
        }
    }
}
