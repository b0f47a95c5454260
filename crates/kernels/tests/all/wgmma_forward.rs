//! Tests of the persistent `wgmma` family of sm_90a on the emulator: no hazards with every check on, and
//! results within the rounding of P and O.

use crate::common::cases;
use crate::common::wgmma_plan::{self, SMALL, SPECULATIVE, check, varied};
use attend::{Chains, Packing, Sums, Tiles};
use emu::{Options, Schedule};
use flashcore_kernels::Plan;
use flashcore_kernels::forward::wgmma::{Diagonal, Ends, Rescaling, Store, WgmmaPlan};
use problem::{Band, DType, Layout, Problem};
use tile::{Handout, Tail, TileOrder, Turns};

fn rectangle(heads: usize, seq_q: usize, seq_kv: usize, dim: usize, mask: Band) -> Problem {
    Problem::new(1, heads, seq_q, dim, DType::Bf16).with_band(mask).with_seq_kv(seq_kv, Layout::Bshd)
}

/// Each value of each gene, on problems of several tiles, blocks and heads with ragged ends.
#[test]
fn every_gene_computes_the_same() {
    let two = WgmmaPlan { consumers: 2, ..WgmmaPlan::PLAIN };
    let plans = [
        WgmmaPlan::PLAIN,
        WgmmaPlan { consumers: 3, ..WgmmaPlan::PLAIN },
        WgmmaPlan { block_n: 48, stages: 1, ..WgmmaPlan::PLAIN },
        WgmmaPlan { block_n: 16, stages: 3, ..WgmmaPlan::PLAIN },
        WgmmaPlan { turns: Turns::PingPong, ..two.clone() },
        WgmmaPlan { turns: Turns::PingPong, consumers: 3, ..WgmmaPlan::PLAIN },
        WgmmaPlan { tiles: Tiles::Overlapped, ..WgmmaPlan::PLAIN },
        WgmmaPlan {
            tiles: Tiles::Overlapped,
            turns: Turns::PingPong,
            handout: Handout::Dynamic,
            ..two.clone()
        },
        WgmmaPlan { tiles: Tiles::Overlapped, stages: 1, ..two.clone() },
        WgmmaPlan { rescale: Rescaling::Always, chains: Chains { max: 4, sum: 2 }, ..WgmmaPlan::PLAIN },
        WgmmaPlan { rescale: Rescaling::Speculative { beyond: 8, limit: 15 }, ..two.clone() },
        WgmmaPlan {
            rescale: Rescaling::Speculative { beyond: 0, limit: 1 },
            tiles: Tiles::Overlapped,
            ..two.clone()
        },
        WgmmaPlan { handout: Handout::Dynamic, ..WgmmaPlan::PLAIN },
        WgmmaPlan { ends: Ends::Own, consumers: 3, ..WgmmaPlan::PLAIN },
        WgmmaPlan { resident_ctas: 2, ..WgmmaPlan::PLAIN },
        WgmmaPlan { store: Store::Bulk, ..WgmmaPlan::PLAIN },
        WgmmaPlan { store: Store::Bulk, queries_ahead: 1, ..two.clone() },
        WgmmaPlan { store: Store::Bulk, tiles: Tiles::Overlapped, cluster: 2, ..two.clone() },
        WgmmaPlan { store: Store::OverQueries, queries_ahead: 1, ..WgmmaPlan::PLAIN },
        WgmmaPlan { store: Store::OverQueries, queries_ahead: 2, handout: Handout::Dynamic, ..two.clone() },
        WgmmaPlan { store: Store::OverQueries, tiles: Tiles::Overlapped, ends: Ends::Own, ..two.clone() },
        WgmmaPlan { cluster: 2, ..WgmmaPlan::PLAIN },
        WgmmaPlan {
            cluster: 2,
            handout: Handout::Dynamic,
            tile_order: TileOrder::LongestFirst,
            ..WgmmaPlan::PLAIN
        },
        WgmmaPlan { cluster: 2, turns: Turns::PingPong, rescale: SPECULATIVE, ..two.clone() },
        WgmmaPlan {
            cluster: 2,
            ends: Ends::Own,
            block_n: 48,
            stages: 1,
            tiles: Tiles::Overlapped,
            tile_order: TileOrder::LongestFirst,
            ..two.clone()
        },
        WgmmaPlan { ends: Ends::Own, block_n: 16, stages: 1, turns: Turns::PingPong, ..two.clone() },
        WgmmaPlan {
            ends: Ends::Own,
            consumers: 3,
            tiles: Tiles::Overlapped,
            turns: Turns::PingPong,
            handout: Handout::Dynamic,
            ..WgmmaPlan::PLAIN
        },
        WgmmaPlan {
            ends: Ends::Own,
            consumers: 3,
            block_n: 16,
            stages: 1,
            tiles: Tiles::Overlapped,
            rescale: SPECULATIVE,
            ..WgmmaPlan::PLAIN
        },
        WgmmaPlan { tile_order: TileOrder::LongestFirst, ..WgmmaPlan::PLAIN },
        WgmmaPlan { tile_order: TileOrder::LongestFirst, handout: Handout::Folded, ..WgmmaPlan::PLAIN },
        WgmmaPlan { handout: Handout::Folded, cluster: 2, tiles: Tiles::Overlapped, ..two.clone() },
        WgmmaPlan { tile_order: TileOrder::LongestFirst, handout: Handout::Dynamic, ..two },
    ];
    for (i, plan) in plans.into_iter().enumerate() {
        for (j, mask) in Band::NAMED.into_iter().enumerate() {
            let problem = rectangle(3, 200, 150 + 10 * j, [64, 128][i % 2], mask);
            check(&problem, plan.clone(), Options { seed: (2 * i + j) as u64, ..Options::default() });
        }
    }
}

/// Row sums by products, together with each compatible gene and every kind of softmax; some blocks are
/// recomputed.
#[test]
fn sums_by_products_are_right() {
    let base = WgmmaPlan { sums: Sums::Product, ..WgmmaPlan::PLAIN };
    let guessing = |limit| Rescaling::Speculative { beyond: 0, limit };
    let plans = [
        WgmmaPlan { rescale: Rescaling::Always, ..base.clone() },
        base.clone(),
        WgmmaPlan { rescale: guessing(1), consumers: 2, turns: Turns::PingPong, ..base.clone() },
        WgmmaPlan { rescale: guessing(7), tiles: Tiles::Overlapped, stages: 3, ..base.clone() },
        WgmmaPlan { rescale: guessing(2), ends: Ends::Own, diagonal: Diagonal::Halved, ..base.clone() },
        WgmmaPlan { rescale: guessing(7), cluster: 2, store: Store::Bulk, ..base.clone() },
        WgmmaPlan { rescale: guessing(3), tail: Tail::Shared, consumers: 3, ..base.clone() },
        WgmmaPlan { handout: Handout::Dynamic, block_n: 48, stages: 1, ..base },
    ];
    for (i, plan) in plans.into_iter().enumerate() {
        for mask in Band::NAMED {
            let problem = rectangle(3, 200, 250, 64, mask);
            let options = Options { seed: i as u64, ..Options::default() };
            match Plan::Wgmma(plan.clone()).check(&problem, &SMALL) {
                Ok(()) => check(&problem, plan.clone(), options),
                Err(reason) => {
                    let of_mask = plan.tail == Tail::Shared || plan.diagonal == Diagonal::Halved;
                    assert!(of_mask, "{plan:?}: {reason}");
                }
            }
        }
    }
}

/// The torture set with tiles of several shapes. Problems that tensor maps cannot describe are rejected.
#[test]
fn torture_set_is_right_and_without_hazards() {
    let (mut passed, mut refused) = (0, 0);
    for (i, problem) in cases::torture().iter().enumerate() {
        let plan = WgmmaPlan {
            handout: [Handout::Static, Handout::Dynamic, Handout::Folded][i / 3 % 3],
            tile_order: [TileOrder::InOrder, TileOrder::LongestFirst][i / 5 % 2],
            ends: [Ends::Own, Ends::Common][i / 4 % 2],
            store: if problem.head_dim_v % 64 == 0 {
                [Store::Direct, Store::Bulk][i % 2]
            } else {
                Store::Direct
            },
            ..varied(i, WgmmaPlan::PLAIN)
        };
        match Plan::Wgmma(plan.clone()).check(problem, &SMALL) {
            Ok(()) => {
                passed += 1;
                check(problem, plan, Options { seed: i as u64, ..Options::default() });
            }
            Err(reason) => {
                refused += 1;
                let known =
                    ["value '0' for seq_kv", " stride"].iter().any(|part| reason.to_string().contains(part));
                assert!(known, "{problem:?}: {reason}");
            }
        }
    }
    // Rejected problems: no keys (3), reversed rows (2), one row for all, rows of 67 elements.
    assert_eq!((passed > 60, refused), (true, 7));
}

/// Values narrower than keys, with the default plan and with genes that divide or store either tensor.
#[test]
fn values_may_be_narrower_than_keys() {
    for (i, problem) in cases::narrow_values(150, 170).into_iter().enumerate() {
        let two = WgmmaPlan { consumers: 2, block_n: 48, ..WgmmaPlan::PLAIN };
        let plans = [
            WgmmaPlan::default_for(&problem, &SMALL),
            WgmmaPlan { cluster: 2, store: Store::Bulk, turns: Turns::PingPong, ..two.clone() },
            WgmmaPlan { tiles: Tiles::Overlapped, rescale: SPECULATIVE, ends: Ends::Own, ..two },
        ];
        for plan in plans {
            check(&problem, plan, Options { seed: i as u64, ..Options::default() });
        }
        if matches!(problem.head_dim_v, 64 | 128 | 256) {
            let plan = WgmmaPlan { store: Store::OverQueries, queries_ahead: 1, ..WgmmaPlan::PLAIN };
            check(&problem, plan, Options { seed: i as u64, ..Options::default() });
        }
    }
}

/// O over Q with four warps to a panel, two and one, in clusters, and in the shape of the tuned plans.
#[test]
fn output_may_take_the_place_of_queries() {
    let over = WgmmaPlan { store: Store::OverQueries, queries_ahead: 1, ..WgmmaPlan::PLAIN };
    let two = WgmmaPlan { cluster: 2, handout: Handout::Dynamic, ..over.clone() };
    let tuned = WgmmaPlan {
        consumers: 3,
        block_n: 64,
        stages: 4,
        ends: Ends::Own,
        handout: Handout::Dynamic,
        tile_order: TileOrder::LongestFirst,
        rescale: SPECULATIVE,
        ..over.clone()
    };
    for (i, (dim, plan)) in [(64, two.clone()), (128, two), (256, over), (128, tuned)].into_iter().enumerate()
    {
        for (j, band) in [Band::CAUSAL, Band::window(70, 0)].into_iter().enumerate() {
            let problem = rectangle(3, 400, 420, dim, band);
            check(&problem, plan.clone(), Options { seed: (2 * i + j) as u64, ..Options::default() });
        }
    }
}

#[test]
fn plans_without_room_for_output_over_queries_are_refused() {
    let over = WgmmaPlan { store: Store::OverQueries, queries_ahead: 1, ..WgmmaPlan::PLAIN };
    let problem = |dim| Problem::new(1, 2, 200, dim, DType::F16);
    let refused = |problem: &Problem, plan: &WgmmaPlan| {
        Plan::Wgmma(plan.clone()).check(problem, &SMALL).unwrap_err().to_string()
    };
    for (text, expected) in [
        (refused(&problem(64), &WgmmaPlan { queries_ahead: 0, ..over.clone() }), "'0' for queries_ahead"),
        (refused(&problem(192), &over), "'192' for head_dim_v"),
        (
            refused(&Problem { head_dim: 64, ..problem(128) }.with_layout(Layout::Bshd), &over),
            "head_dim (64)",
        ),
        (refused(&Problem::new(1, 2, 200, 64, DType::E4m3), &over), "inputs of 16 bits"),
    ] {
        assert!(text.contains(expected) && text.contains("over_queries"), "{text}");
    }
}

/// Groups of heads that divide a tile's rows evenly or leave a remainder, masked by position.
#[test]
fn packed_heads_are_apart_again_in_the_output() {
    for (i, (heads_kv, seq_q, consumers)) in
        [(2, 50, 2), (1, 33, 1), (4, 7, 1), (1, 1, 1)].into_iter().enumerate()
    {
        for (mask, seq_kv, dim, layout) in [
            (Band::FULL, 90, 64, Layout::Bshd),
            (Band::CAUSAL, 90, 128, Layout::Bhsd),
            (Band::CAUSAL, 90, 72, Layout::Bshd),
            (Band::CAUSAL_TOP_LEFT, 23, 64, Layout::Bshd),
        ] {
            let mut problem = Problem::new(2, 8, seq_q, dim, DType::F16).with_band(mask);
            problem.seq_kv = seq_kv;
            let problem = problem.with_heads_kv(heads_kv, layout);
            let packing = Packing::Packed;
            let tiles = [Tiles::InTurn, Tiles::Overlapped][i % 2];
            let plan = WgmmaPlan { packing, consumers, tiles, rescale: SPECULATIVE, ..WgmmaPlan::PLAIN };
            check(&problem, plan, Options { seed: i as u64, ..Options::default() });
        }
    }
}

/// Rows that see half a block, less, or more, with the diagonal at several places of a tile.
#[test]
fn halved_diagonals_leave_nothing_out() {
    for (i, (mask, seq_q, seq_kv, consumers, block_n)) in [
        (Band::CAUSAL, 200, 200, 1, 32),
        (Band::CAUSAL, 200, 187, 2, 64),
        (Band::CAUSAL, 130, 260, 3, 128),
        (Band::CAUSAL, 90, 40, 2, 32),
        (Band::CAUSAL_TOP_LEFT, 200, 84, 2, 64),
        (Band::CAUSAL_TOP_LEFT, 300, 150, 3, 128),
    ]
    .into_iter()
    .enumerate()
    {
        let problem = rectangle(2, seq_q, seq_kv, 64, mask);
        let (diagonal, ends) = (Diagonal::Halved, Ends::Own);
        let rescale = [SPECULATIVE, Rescaling::Always][i % 2];
        let turns = if consumers == 1 { Turns::Free } else { Turns::PingPong };
        for tiles in [Tiles::InTurn, Tiles::Overlapped] {
            let plan =
                WgmmaPlan { consumers, block_n, tiles, diagonal, ends, rescale, turns, ..WgmmaPlan::PLAIN };
            check(&problem, plan, Options { seed: i as u64, ..Options::default() });
        }
    }
}

/// Windows whose lower bound lies in other blocks for each warpgroup of a tile: the warpgroups skip up to
/// four times as many blocks as there are stages, at both ends of the tile.
#[test]
fn warpgroups_skip_more_blocks_than_there_are_stages() {
    let handouts = [Handout::Static, Handout::Dynamic];
    for (i, (consumers, cluster, block_n, stages)) in [
        (3, 1, 64, 1),
        (3, 1, 64, 2),
        (3, 1, 32, 2),
        (3, 1, 32, 3),
        (2, 1, 16, 1),
        (2, 2, 48, 2),
        (3, 2, 64, 3),
    ]
    .into_iter()
    .enumerate()
    {
        let problem = rectangle(2, 650, 650, 64, Band::window(255, 0));
        for (j, turns) in [Turns::Free, Turns::PingPong].into_iter().enumerate() {
            let plan = WgmmaPlan {
                consumers,
                cluster,
                block_n,
                stages,
                turns,
                ends: Ends::Own,
                handout: handouts[(i + j) % 2],
                ..WgmmaPlan::PLAIN
            };
            check(&problem, plan, Options { seed: i as u64, ..Options::default() });
        }
    }
}

/// Scores grow from the first visited block to the last, far beyond any reference, so every block is
/// recomputed.
#[test]
fn bad_guesses_are_made_good() {
    for dtype in [DType::F16, DType::Bf16] {
        for (scale, tiles) in [(20.0, Tiles::InTurn), (-300.0, Tiles::Overlapped)] {
            let mut problem = Problem::new(1, 2, 130, 64, dtype).with_seq_kv(170, Layout::Bhsd);
            problem.score.scale = Some(scale);
            let plan = WgmmaPlan { rescale: SPECULATIVE, consumers: 2, tiles, ..WgmmaPlan::PLAIN };
            check(&problem, plan.clone(), Options::default());
            check(&problem.with_band(Band::CAUSAL), plan, Options::default());
        }
    }
}

#[test]
fn every_schedule_gives_the_same_clean_result() {
    let problem = rectangle(2, 150, 200, 64, Band::CAUSAL);
    for (tiles, cluster) in [(Tiles::InTurn, 2), (Tiles::Overlapped, 1)] {
        for schedule in [Schedule::Late, Schedule::Early, Schedule::Random] {
            for seed in 0..3 {
                let (rescale, turns, handout) = (SPECULATIVE, Turns::PingPong, Handout::Dynamic);
                let ends = Ends::Own;
                let plan = WgmmaPlan {
                    consumers: 2,
                    cluster,
                    tiles,
                    rescale,
                    turns,
                    handout,
                    ends,
                    ..WgmmaPlan::PLAIN
                };
                check(&problem, plan, Options { seed, schedule, ..Options::default() });
            }
        }
    }
}

/// Random combinations of genes on ragged problems with groups of heads.
#[test]
fn genes_get_along() {
    wgmma_plan::genes_get_along(|draw, plan| {
        let (seq_q, seq_kv) = (1 + draw.below(300), 1 + draw.below(300));
        let problem = rectangle(4, seq_q, seq_kv, draw.of(&[64, 128]), draw.of(&Band::NAMED));
        (problem.with_heads_kv(draw.of(&[1, 2, 4]), draw.of(&[Layout::Bshd, Layout::Bhsd])), plan)
    });
}
