//! Tests of the gate on 8-bit inputs: the torture set and the default plans with descale factors in the
//! family `mma`, and the torture set with descale factors in both families. Some outputs are in f32.

use judge::inputs::Style;
use std::collections::{BTreeMap, BTreeSet};

use crate::common::{half_of_torture_passes, in_rows, passes, plain_mma};
use attend::Order;
use emu::Schedule;
use flashcore_check::gate::torture::Torture;
use flashcore_check::gate::{Settings, bind, check_kernel, torture};
use kernels::forward::mma::{MmaPlan, QueryHome};
use kernels::{Arch, Family, Plan};
use problem::{Band, DTypes, Layout, Problem, ScaleLayout, Scales};

#[test]
fn the_torture_set_passes() {
    for (i, types) in ["e4m3:f32", "e5m2/e4m3/bf16"].into_iter().enumerate() {
        let dtypes: DTypes = types.parse().unwrap();
        let problems = in_rows(torture::problems(dtypes, 64));
        half_of_torture_passes(&problems, i, problems.len(), &types, |problem| {
            let plan = MmaPlan {
                block_n: 32,
                stages: [1, 3][i],
                products: if i == 0 { Order::InTurn } else { Order::ScoresAhead },
                queries: QueryHome::Shared,
                ..plain_mma(&problem.canonical(), &Arch::SM_89)
            };
            Some(bind(&Plan::Mma(plan), &problem.clone().with_lse(true), &Arch::SM_89).unwrap())
        });
    }
}

/// Groups of 1 and 8 query heads, each mask, both types, head dims 64, 128 and 256.
#[test]
fn default_plans_pass_with_factors() {
    for (i, (heads_kv, dim, band, types)) in [
        (8, 64, Band::FULL, "e4m3"),
        (1, 128, Band::CAUSAL, "e4m3"),
        (1, 64, Band::window(40, 0), "e5m2"),
        (8, 256, Band::CAUSAL, "e5m2:f16"),
        (1, 128, Band::FULL, "e4m3/e5m2/f16"),
    ]
    .into_iter()
    .enumerate()
    {
        let dtypes: DTypes = types.parse().unwrap();
        let problem = Problem::new(1, 8, 70, dim, dtypes).with_heads_kv(heads_kv, Layout::Bshd);
        let scales = Scales {
            q: Some(ScaleLayout::TENSOR),
            k: Some(ScaleLayout::per_head(heads_kv)),
            v: dtypes.v.is_fp8().then(|| ScaleLayout::per_head(heads_kv)),
        };
        let problem = Problem { scales, ..problem.with_seq_kv(200, Layout::Bshd).with_band(band) };
        let arch = [Arch::SM_89, Arch::SM_120][i % 2];
        let plan = Family::Mma.default_for(&problem, &arch).unwrap();
        let bound = bind(&plan, &problem, &arch).unwrap();
        passes(&check_kernel(&bound, &Settings::quick()).unwrap(), &(plan, problem));
    }
}

/// The torture set with factors of heads (0 rows) and per block of rows, whose blocks begin at the first row
/// of each sequence. Some draws have factors of Q and K that are not accepted. `wgmma` refuses uneven keys
/// beside 8-bit values, so its packed sequences have 16-bit values.
///
/// A kernel runs on some of the draws. The draws follow the problem and the types, so that each problem meets
/// every draw in a family, but for those that `wgmma` takes with one choice of types: these meet every draw
/// together.
#[test]
fn factors_of_heads_and_of_blocks_of_rows_pass() {
    let draws = [
        (Style::Normal, 1, Schedule::Late),
        (Style::Rising, 2, Schedule::Random),
        (Style::BadFactors, 7, Schedule::Early),
        (Style::BadFactors, 5, Schedule::Random),
        (Style::BadFactors, 11, Schedule::Late),
    ];
    for (family, draws_of_each, kinds) in [
        (Family::Mma, 2, [("e4m3", [64, 64, 64]), ("e5m2", [128, 64, 128]), ("e4m3", [0, 0, 0])]),
        (
            Family::Wgmma,
            3,
            [("e4m3:f32", [64, 64, 64]), ("e4m3/e5m2/bf16", [64, 128, 0]), ("e4m3:f32", [0, 0, 0])],
        ),
    ] {
        let mut met = BTreeMap::<&str, BTreeSet<usize>>::new();
        for (i, (types, rows)) in kinds.into_iter().enumerate() {
            let dtypes: DTypes = types.parse().unwrap();
            let of = |problem: &Problem, rows, seq| match rows {
                0 => ScaleLayout::per_head(problem.heads_kv),
                _ => ScaleLayout::per_block(problem.heads_kv, seq, rows),
            };
            let arch = if family == Family::Mma { Arch::SM_89 } else { Arch::SM_90 };
            let problems = in_rows(torture::problems(dtypes, 64));
            let mut supported = 0;
            for (j, Torture { name, mut problem }) in problems.iter().cloned().enumerate() {
                problem.scales = Scales {
                    q: Some(of(&problem, rows[0], problem.seq_q)),
                    k: Some(of(&problem, rows[1], problem.seq_kv)),
                    v: dtypes.v.is_fp8().then(|| of(&problem, rows[2], problem.seq_kv)),
                };
                let problem = problem.with_lse(true);
                let Ok(plan) = family.default_for(&problem, &arch) else { continue };
                supported += 1;
                let of_kernel = (0..draws_of_each).map(|n| (j + i * draws_of_each + n) % draws.len());
                met.entry(name).or_default().extend(of_kernel.clone());
                let settings = Settings { runs: of_kernel.map(|n| draws[n]).collect(), ..Settings::quick() };
                let bound = bind(&plan, &problem, &arch).unwrap();
                passes(&check_kernel(&bound, &settings).unwrap(), &(family, types, name));
            }
            assert!(supported >= if family == Family::Mma { problems.len() } else { 15 }, "{supported}");
        }
        let full = met.values().filter(|met| met.len() == draws.len()).count();
        let some: BTreeSet<usize> =
            met.values().filter(|met| met.len() < draws.len()).flatten().copied().collect();
        assert!(full == met.len() || some.len() == draws.len(), "{family:?} {met:?}");
    }
}
