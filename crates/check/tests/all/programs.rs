//! Tests of the gate with score and mask programs and attention sinks: in every family, pairs of features
//! pass, and kernels of slightly different problems fail.

use crate::common::programs::{FEATURES, Feature, draft};
use crate::common::{SMALL, plain_wgmma};
use attend::{Order, Packing, Rescale, Sums, Tiles};
use emu::Schedule;
use filetest::is_due;
use flashcore_check::gate::{Settings, Verdict, bind, check_kernel};
use flashcore_check::launchfile::Bound;
use judge::inputs::Style;
use kernels::forward::mma::{MmaPlan, QueryHome};
use kernels::forward::small::{AtOncePlan, Merge, StreamedPlan};
use kernels::forward::wgmma::{Diagonal, Ends, Rescaling, WgmmaPlan};
use kernels::{Arch, Family, Plan};
use problem::program::library as lib;
use problem::{Band, DType, ElementType, Expr, Layout, PassKind, Problem, Program, Programs, Table};
use tile::{RowStore, Tail, Turns};

const SCHEDULES: [Schedule; 3] = [Schedule::Late, Schedule::Early, Schedule::Random];

/// Ragged lengths, few queries, and rows that see no key where a causal band is added.
const LENGTHS: [(usize, usize); 5] = [(70, 90), (33, 33), (1, 75), (90, 41), (17, 130)];

/// A problem with two features. Type, group size and lengths follow the number.
fn pair(first: &Feature, second: &Feature, number: usize) -> Problem {
    let (seq_q, seq_kv) = LENGTHS[number % LENGTHS.len()];
    let dtype = [DType::F16, DType::Bf16][number / 2 % 2];
    let (batch, heads, heads_kv) = [(2, 2, 2), (1, 5, 1), (1, 8, 1)][number % 3];
    let dim = [32, 64][number / 3 % 2];
    let mut problem = Problem::new(batch, heads, seq_q, dim, dtype)
        .with_seq_kv(seq_kv, Layout::Bshd)
        .with_heads_kv(heads_kv, Layout::Bshd)
        .with_lse(true);
    problem.score.scale = (number % 7 == 3).then_some(-0.2);
    draft(problem, &[first, second])
}

fn once(number: usize) -> Settings {
    let run = (Style::Normal, number as u64, SCHEDULES[number % 3]);
    Settings { runs: vec![run], lagging: false, ..Settings::quick() }
}

#[test]
fn pairs_of_features_pass_in_every_family() {
    let mut number = 0;
    for (i, first) in FEATURES.iter().enumerate() {
        for second in &FEATURES[i + 1..] {
            for family in Family::of_pass(PassKind::Forward) {
                number += 1;
                // Half of the families for each pair.
                if !is_due(number + number / Family::ALL.len(), 2) {
                    continue;
                }
                let problem = pair(first, second, number);
                let name = format!("{} {} {family:?} {problem:?}", first.name, second.name);
                let plan = family.default_for(&problem, &SMALL).unwrap_or_else(|e| panic!("{name}: {e}"));
                let bound = bind(&plan, &problem, &SMALL).unwrap_or_else(|e| panic!("{name}: {e}"));
                let settings = if number % 16 == 0 { Settings::quick() } else { once(number) };
                let report = check_kernel(&bound, &settings).unwrap_or_else(|e| panic!("{name}: {e}"));
                assert_eq!(
                    report.verdict,
                    Verdict::Passed,
                    "{name}\n{:?}\n{:?}",
                    report.reasons,
                    report.hazards
                );
            }
        }
    }
}

/// Each operation, on negative numbers and zeros, at all places: in a row, in a column and in a score.
#[test]
fn every_operation_is_right() {
    let masks = [
        "(q - k) / -3 == -(k / 5)",
        "(q - k) % -4 < -1",
        "(q - k) / 7 >= 0",
        "(q + k) % 6 != 0",
        "(q - k) / i0 == 0",
        "(q - k) % i1 <= 2",
        "(k - 20) / 4 != (q - 9) / i1",
        "(1 << (k - q)) > 3",
        "(k * 977 ^ q * 13) >> 1 & 3 != 0",
        "(k - 40) >> (q - 30) < 0",
        "((!q & 4 | k & 2) == 6) | (k == 0)",
        "!(q > k) ^ (k % 3 == 1)",
        "select(q > k, k % 3 == 1, q % 2 == 0)",
        "(q > k) == (k > 17)",
        "abs(min(q, 30) - max(k, 20)) < 9",
        "n0[h, q - k] >= 2",
        "n0[min(h, 1), q / 2] > n0[1, k * 3]",
        "true",
        "false",
    ];
    let scores = [
        "s + sqrt(float(k)) - log2(float(q + 1))",
        "exp2(s * 0.25) - 1.0",
        "tanh(s / f0) * f0 / float(h + 1)",
        "-abs(s) + min(s, 0.5) * max(s, -0.5)",
        "s * float(int(float(k) * 0.4)) * 0.1",
        "s + float(q > k) - float(int(k > 9))",
        "float(k - q) * 0.03 - s",
        "select(s > 0.2, s, -inf)",
        "s + float(b + h * 2)",
        "f0",
        // The cosine, the sine, the error function and the logarithm of 1 + x, as the Python package writes
        // them.
        "v0 = s * 0.3183098861837907 + 1.0; v1 = select(abs(v0) < 2147483648.0, float(int(v0)), v0); \
         v2 = select(v1 > v0, v1 - 1.0, v1); v3 = v2 - 0.5; v4 = (s - v3 * 3.140625) - v3 * 0.000967653589793116; \
         v5 = v4 * v4; v6 = -2.505210838544172e-08 + 1.6059043836821613e-10 * v5; \
         v7 = 2.7557319223985893e-06 + v6 * v5; v8 = -0.0001984126984126984 + v7 * v5; \
         v9 = 0.008333333333333333 + v8 * v5; v10 = -0.16666666666666666 + v9 * v5; v11 = 1.0 + v10 * v5; \
         v4 * v11 * float(1 - 2 * (int(v2) & 1))",
        "v0 = s * 0.3183098861837907 + 0.5; v1 = select(abs(v0) < 2147483648.0, float(int(v0)), v0); \
         v2 = select(v1 > v0, v1 - 1.0, v1); v3 = v2 - 0.0; v4 = (s - v3 * 3.140625) - v3 * 0.000967653589793116; \
         v5 = v4 * v4; v6 = -2.505210838544172e-08 + 1.6059043836821613e-10 * v5; \
         v7 = 2.7557319223985893e-06 + v6 * v5; v8 = -0.0001984126984126984 + v7 * v5; \
         v9 = 0.008333333333333333 + v8 * v5; v10 = -0.16666666666666666 + v9 * v5; v11 = 1.0 + v10 * v5; \
         v4 * v11 * float(1 - 2 * (int(v2) & 1))",
        "v0 = 1.0 / (1.0 + 0.3275911 * abs(s)); v1 = -1.453152027 + 1.061405429 * v0; v2 = 1.421413741 + v1 * v0; \
         v3 = -0.284496736 + v2 * v0; v4 = 0.254829592 + v3 * v0; v5 = v0 * v4; \
         v6 = 1.0 - v5 * exp2(s * s * -1.4426950408889634); select(s < 0.0, -(v6), v6)",
        "x = abs(s); v0 = select(abs(x) < 0.25, x / (2.0 + x), 0.0); v1 = v0 * v0; \
         v2 = 0.2857142857142857 + 0.2222222222222222 * v1; v3 = 0.4 + v2 * v1; v4 = 0.6666666666666666 + v3 * v1; \
         v5 = 2.0 + v4 * v1; v6 = log2(1.0 + x) * 0.6931471805599453; select(abs(x) < 0.25, v0 * v5, v6)",
    ];
    let families: Vec<Family> = Family::of_pass(PassKind::Forward).collect();
    let masks = masks.iter().map(|mask| (None, Some(*mask)));
    for (i, (score, mask)) in scores.iter().map(|score| (Some(*score), None)).chain(masks).enumerate() {
        let program = |text: &str| text.parse().unwrap_or_else(|error| panic!("{text}: {error}"));
        let mut problem =
            Problem::new(2, 2, 40, 32, DType::Bf16).with_seq_kv(50, Layout::Bshd).with_lse(true);
        problem.programs = Programs {
            score: score.map(program),
            mask: mask.map(program),
            floats: vec![2.5],
            ints: vec![0, -5],
            tables: vec![Table::dense(ElementType::I32, &[2, 30])],
        };
        let family = families[i % families.len()];
        let plan = family.default_for(&problem, &SMALL).unwrap();
        let report = check_kernel(&bind(&plan, &problem, &SMALL).unwrap(), &once(i)).unwrap();
        let (reasons, hazards) = (report.reasons, report.hazards);
        assert_eq!(report.verdict, Verdict::Passed, "{score:?} {mask:?}\n{reasons:?}\n{hazards:?}");
    }
}

/// Plans with features that defaults do not use: speculation, halved diagonals, overlapped tiles, skips,
/// shared tails, clusters, keys divided among warps, packed heads.
fn variants(problem: &Problem) -> Vec<Plan> {
    let plain = WgmmaPlan { block_n: 32, packing: Packing::Apart, ..plain_wgmma(problem) };
    let speculative = Rescaling::Speculative { beyond: 0, limit: 7 };
    let wgmma = [
        WgmmaPlan { rescale: speculative, tiles: Tiles::Overlapped, turns: Turns::PingPong, ..plain.clone() },
        WgmmaPlan { rescale: speculative, sums: Sums::Product, ..plain.clone() },
        WgmmaPlan { diagonal: Diagonal::Halved, tiles: Tiles::Overlapped, ..plain.clone() },
        WgmmaPlan { cluster: 2, rescale: Rescaling::Always, ..plain.clone() },
        WgmmaPlan { tail: Tail::Shared, ends: Ends::Common, block_n: 16, ..plain.clone() },
        WgmmaPlan { packing: Packing::Packed, rescale: speculative, ..plain },
    ];
    let at_once = AtOncePlan {
        row_warpgroups: 1,
        packing: Packing::Apart,
        cluster: 2,
        kv_warpgroups: 1,
        block_n: 128,
        key_copies: 1,
        qk_pieces: 2,
        softmax_steps: 2,
        pv_pieces: 1,
        merge: Merge::PeerFirst,
        store: RowStore::Pairs,
        ..AtOncePlan::default_for(problem, &SMALL)
    };
    let default = StreamedPlan::default_for(problem, &SMALL);
    let streamed = StreamedPlan {
        block_n: 32,
        rescale: Rescale::Always,
        store: RowStore::Pairs,
        tile_order: default.tile_order,
        overlapping: default.overlapping,
        tanh: default.tanh,
        ..StreamedPlan::BASE
    };
    let streamed = [
        StreamedPlan { cluster: 2, kv_warpgroups: 2, ..streamed.clone() },
        StreamedPlan { row_warpgroups: 2, speculative: Some(7), block_n: 16, ..streamed.clone() },
        StreamedPlan { row_warpgroups: 2, turns: Turns::PingPong, ..streamed.clone() },
        StreamedPlan { packing: Packing::Packed, ..streamed },
    ];
    let small = streamed.into_iter().map(Plan::from).chain([Plan::from(at_once)]);
    let plain = MmaPlan {
        block_m: 32,
        block_n: 64,
        warps: 4,
        kv_warps: 2,
        stages: 2,
        queries: QueryHome::Shared,
        resident_ctas: None,
        ..MmaPlan::default_for(problem, &SMALL)
    };
    let mma = [
        MmaPlan { products: Order::InTurn, ..plain.clone() },
        MmaPlan { products: Order::ScoresAhead, block_m: 16, kv_warps: 4, ..plain },
    ];
    let mma = mma.into_iter().map(Plan::Mma);
    mma.chain(wgmma.into_iter().map(Plan::Wgmma)).chain(small).collect()
}

#[test]
fn variants_of_plans_pass() {
    let named = |names: [&str; 3]| {
        let of_name = |name: &str| FEATURES.iter().find(|feature| feature.name == name).unwrap();
        names.map(of_name)
    };
    let sets = [["alibi", "causal", "sink"], ["bias", "mask", "sink"], ["document", "softcap", "sink"]];
    let mut ran = [0; 13];
    for (i, features) in sets.map(named).iter().enumerate() {
        let by_lanes = Problem::new(1, 4, 70, 64, DType::Bf16)
            .with_seq_kv(150, Layout::Bshd)
            .with_heads_kv(2, Layout::Bshd);
        let problem = draft(by_lanes, features);
        for (j, plan) in variants(&problem).into_iter().enumerate() {
            // Products compute the sums of problems without the LSE only.
            let lse = !matches!(&plan, Plan::Wgmma(plan) if plan.sums == Sums::Product);
            let problem = problem.clone().with_lse(lse);
            match plan.check(&problem, &SMALL) {
                Ok(()) => {}
                Err(reason) => {
                    assert!(reason.to_string().contains("mask"), "{plan:?}: {reason}");
                    continue;
                }
            }
            ran[j] += 1;
            let bound = bind(&plan, &problem, &SMALL).unwrap();
            let runs = [Style::Normal, Style::Rising, Style::NonFinite];
            let runs = runs.map(|style| (style, (i + j) as u64, SCHEDULES[(i + j) % 3])).to_vec();
            let report = check_kernel(&bound, &Settings { runs, ..once(0) }).unwrap();
            assert_eq!(
                report.verdict,
                Verdict::Passed,
                "{plan:?}\n{:?}\n{:?}",
                report.reasons,
                report.hazards
            );
        }
    }
    assert!(ran.iter().all(|&times| times > 0), "{ran:?}");
}

/// A problem with an expression as score or mask program, for four heads that share two key heads.
fn problem(score: Option<Expr>, mask: Option<Expr>) -> Problem {
    let mut problem = Problem::new(1, 4, 70, 64, DType::Bf16)
        .with_seq_kv(90, Layout::Bhsd)
        .with_heads_kv(2, Layout::Bhsd)
        .with_lse(true);
    let program = |expr: Expr| Program::new(&expr).unwrap();
    problem.programs = Programs {
        score: score.map(program),
        mask: mask.map(program),
        floats: vec![3.0],
        ints: vec![7],
        tables: vec![
            Table::dense(ElementType::F32, &[1, 4, 70, 90]),
            Table::dense(ElementType::F32, &[1, 4]),
        ],
    };
    problem
}

/// Checks the kernel of `emitted` as if it were one of `judged`.
fn verdict(family: Family, emitted: &Problem, judged: &Problem) -> Verdict {
    let plan = family.default_for(emitted, &Arch::SM_90).unwrap();
    let program = kernels::emit(emitted, &plan, &Arch::SM_90).unwrap();
    let bound = Bound::of_program(program, judged);
    check_kernel(&bound, &once(1)).unwrap().verdict
}

/// Each right problem with a wrong one: a bias of another head or row, slopes of another head, distances that
/// are off by one row, a mask before the cap, a missing mask, and a missing sink.
#[test]
fn kernels_of_other_programs_fail() {
    let bias =
        |head: Expr, query: Expr| lib::score() + Expr::load(0, true, [lib::batch(), head, query, lib::key()]);
    let slopes = |head: Expr, off: i32| {
        let distance = (lib::level() + off - lib::key()).abs();
        lib::score() - Expr::load(1, true, [lib::batch(), head]) * distance
    };
    let next = |index: Expr, last: i32| (index + 1).min(last);
    let mask = || lib::dilated(lib::int(0));
    let capped = |score: Expr| (score / lib::float(0)).tanh() * lib::float(0);
    let with_sink = |mut problem: Problem| {
        problem.score.sink = true;
        problem
    };
    let right_bias = problem(Some(bias(lib::head(), lib::query())), None);
    let right_slopes = problem(Some(slopes(lib::head(), 0)), None);
    let masked = problem(None, Some(mask()));
    let cap_then_mask = problem(None, Some(mask())).with_softcap(3.0);
    let mask_then_cap = problem(Some(capped(mask().select(lib::score(), f32::NEG_INFINITY))), None);
    for (name, right, wrong) in [
        ("head of the bias", &right_bias, problem(Some(bias(next(lib::head(), 3), lib::query())), None)),
        ("row of the bias", &right_bias, problem(Some(bias(lib::head(), next(lib::query(), 69))), None)),
        ("head of the slopes", &right_slopes, problem(Some(slopes(next(lib::head(), 3), 0)), None)),
        ("row of the distance", &right_slopes, problem(Some(slopes(lib::head(), 1)), None)),
        ("mask before the cap", &cap_then_mask, mask_then_cap),
        ("no mask", &masked, problem(None, None)),
        ("no sink", &with_sink(masked.clone()), masked.clone()),
    ] {
        for family in Family::of_pass(PassKind::Forward) {
            assert_eq!(verdict(family, right, right), Verdict::Passed, "{name} {family:?}");
            assert_eq!(verdict(family, &wrong, right), Verdict::Failed, "{name} {family:?}");
        }
    }
}

/// A large negative score hides a key as −∞ does, in the first blocks of a row and in whole rows.
#[test]
fn large_negative_scores_hide_keys() {
    for dtype in [DType::Bf16, DType::F16] {
        let hidden_by = |value: f32| {
            let shown = (lib::key() + lib::query()).ge(lib::int(0)) & lib::query().ne(5);
            let mut problem = problem(Some(shown.select(lib::score(), value)), None);
            problem = problem.with_seq_kv(300, Layout::Bhsd);
            (problem.dtypes, problem.programs.ints) = (dtype.into(), vec![220]);
            problem
        };
        let judged = hidden_by(f32::NEG_INFINITY);
        for family in Family::of_pass(PassKind::Forward) {
            for value in [-1e10, -1e30, f32::MIN] {
                let verdict = verdict(family, &hidden_by(value), &judged);
                assert_eq!(verdict, Verdict::Passed, "{dtype} {family:?} {value:e}");
            }
        }
    }
}

/// A sink that counts twice fails, also if several warps share the keys.
#[test]
fn sinks_that_count_twice_fail() {
    let mut problem = problem(None, None).with_band(Band::window(20, 0));
    problem.score.sink = true;
    for family in Family::of_pass(PassKind::Forward) {
        let plan = family.default_for(&problem, &Arch::SM_90).unwrap();
        let bound = bind(&plan, &problem, &Arch::SM_90).unwrap();
        let verdict = |bound: &Bound| check_kernel(bound, &once(1)).unwrap().verdict;
        assert_eq!(verdict(&bound), Verdict::Passed, "{family:?}");
        assert_eq!(verdict(&doubled_sinks(&bound)), Verdict::Failed, "{family:?}");
    }
}

/// The kernel with sinks that are a power of two larger, as if each was added twice.
fn doubled_sinks(bound: &Bound) -> Bound {
    let text = bound.kernel.module.to_string();
    let mut lines: Vec<String> = Vec::new();
    let mut sink: Option<String> = None;
    for line in text.lines() {
        lines.push(line.to_owned());
        let words: Vec<&str> = line.split([' ', '\t', ',', ';']).filter(|word| !word.is_empty()).collect();
        match (words.as_slice(), &sink) {
            ([load, to, ..], _) if *load == "ld.global.nc.f32" => sink = Some((*to).to_owned()),
            ([_, to, from, ..], Some(loaded)) if from == loaded => {
                lines.push(format!("    add.rn.f32 {to}, {to}, 0f3F800000;"));
                sink = None;
            }
            _ => {}
        }
    }
    assert_ne!(lines.len(), text.lines().count());
    let mut mutant = bound.clone();
    mutant.kernel.module = ptx::parse(&lines.join("\n")).unwrap().verify().unwrap();
    mutant
}
