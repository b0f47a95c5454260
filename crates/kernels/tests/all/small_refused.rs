//! Tests of plans and problems that the families for small grids reject, with the reason of each.

use crate::common::small_plan::{at_once, streamed};
use attend::Rescale;
use flashcore_kernels::forward::small::{self, AtOncePlan, Merge, RowOrder, StreamedPlan};
use flashcore_kernels::{Arch, Plan};
use problem::{DType, Layout, Problem};
use tile::{RowStore, Turns};

const ARCH: Arch = Arch::SM_90;

/// A change of a plan, and how the reason begins for which the plan is refused.
type Refused<P> = (fn(&mut P), &'static str);

#[test]
fn plans_that_cannot_work_are_refused_with_the_reason() {
    let mission = Problem::mission();
    let Plan::SmallAtOnce(good) = small::default_for(&mission, &ARCH) else {
        panic!("512 keys are held at once")
    };
    let reason = |problem: &Problem, plan: &AtOncePlan, arch: &Arch| {
        Plan::from(plan.clone()).check(problem, arch).expect_err("refused").to_string()
    };
    let of = |change: fn(&mut AtOncePlan)| {
        let mut plan = good.clone();
        change(&mut plan);
        reason(&mission, &plan, &ARCH)
    };
    let of_streamed = |change: fn(&mut StreamedPlan)| {
        let mut plan = StreamedPlan { block_n: 64, ..streamed() };
        change(&mut plan);
        Plan::from(plan).check(&mission, &ARCH).expect_err("refused").to_string()
    };
    let at_once_plans: [Refused<AtOncePlan>; 13] = [
        (|p| p.cluster = 3, "invalid value '3' for cluster: expected 1, 2, 4"),
        (|p| p.cluster = 1, "invalid value '512' for seq_kv: expected up to 256 with this plan"),
        (|p| p.kv_warpgroups = 0, "invalid value '0' for kv_warpgroups:"),
        (|p| p.row_warpgroups = 5, "invalid value '5' for row_warpgroups: expected 1 to 4"),
        (|p| p.block_n = 264, "invalid value '264' for block_n: expected multiples of 16 from 16 to 256"),
        (|p| p.qk_pieces = 3, "invalid value '3' for qk_pieces: expected divisors of block_n / 8"),
        (|p| p.key_copies = 8, "invalid value '8' for key_copies: expected divisors of qk_pieces"),
        (|p| p.softmax_steps = 8, "invalid value '8' for softmax_steps: expected divisors of qk_pieces"),
        (|p| p.pv_pieces = 16, "invalid value '16' for pv_pieces: expected divisors of block_n / (16"),
        // If a product wraps around to a value that divides, the factors still do not divide.
        (|p| p.pv_pieces = (1 << 28) + 1, "invalid value '268435457' for pv_pieces: expected divisors"),
        (
            |p| (p.key_copies, p.qk_pieces) = (1, (1 << 29) + 1),
            "invalid value '536870913' for qk_pieces: expected divisors",
        ),
        (|p| p.kv_warpgroups = 2, "invalid value '2' for kv_warpgroups: expected 1 with merge = peer_first"),
        (
            |p| (p.cluster, p.kv_warpgroups, p.merge) = (4, 2, Merge::Shares),
            "invalid value '8' for head_dim_v / parts:",
        ),
    ];
    let streamed_plans: [Refused<StreamedPlan>; 5] = [
        (|p| p.stages = 1, "invalid value '1' for stages: expected 2 to 8"),
        (|p| p.stages = 9, "invalid value '9' for stages: expected 2 to 8"),
        (|p| p.speculative = Some(16), "invalid value '16' for speculative: expected 1 to 15"),
        (
            |p| p.turns = Turns::PingPong,
            "invalid value '1' for row_warpgroups: expected 2 to 4 with turns = ping_pong",
        ),
        (
            |p| (p.kv_warpgroups, p.row_warpgroups, p.turns) = (2, 2, Turns::PingPong),
            "invalid value '2' for kv_warpgroups: expected 1 with turns = ping_pong",
        ),
    ];
    let reasons = at_once_plans.map(|(change, said)| (of(change), said)).into_iter();
    for (reason, said) in reasons.chain(streamed_plans.map(|(change, said)| (of_streamed(change), said))) {
        assert!(reason.starts_with(said), "{reason}, not {said}");
    }
    let rescaled = StreamedPlan { rescale: Rescale::Beyond(9), ..streamed() };
    let in_f16 = Plan::from(rescaled.clone()).check(&mission, &ARCH).expect_err("refused").to_string();
    assert_eq!(in_f16, "invalid value '9' for rescale.beyond: expected 0 to 8 in f16");
    rescaled.check(&Problem { dtypes: DType::Bf16.into(), ..mission.clone() }, &ARCH).unwrap();
    let crowd = Problem::new(1, 1 << 30, 1, 64, DType::F16);
    let by_rows = AtOncePlan { tile_order: RowOrder::LongestFirst, ..good.clone() };
    assert!(reason(&crowd, &by_rows, &ARCH).starts_with(
        "invalid value '2147483648' for CTAs (cluster · tiles of query rows · heads · batch): expected \
             fewer than 2^31"
    ));
    assert!(of_streamed(|p| p.resident_ctas = 6).contains("bytes of shared memory are needed"));
    let wide = Problem::new(1, 8, 512, 256, DType::F16);
    let plan = AtOncePlan { block_n: 256, ..good.clone() };
    assert!(reason(&wide, &plan, &ARCH).contains("bytes of shared memory are needed"));
    let mut dense = at_once();
    dense.block_n = 256;
    dense.store = RowStore::Chunks;
    let mut unaligned = Problem::new(1, 1, 64, 64, DType::F16);
    unaligned.out.row = 66;
    assert!(reason(&unaligned, &dense, &ARCH).starts_with(
        "invalid value '66' for out row stride with family small_at_once: expected multiples of 8"
    ));
    unaligned.k.row = 68;
    assert!(reason(&unaligned, &dense, &ARCH).contains("k"));
    assert!(reason(&mission, &good, &Arch::SM_89).starts_with("invalid value '89' for sm: expected 90"));
    let no_keys = mission.clone().with_seq_kv(0, Layout::Bhsd);
    assert!(reason(&no_keys, &good, &ARCH).starts_with("invalid value '0' for seq_kv: expected 1 to 2^30"));
    let float = Problem { dtypes: DType::F32.into(), ..mission.clone() };
    assert!(
        reason(&float, &good, &ARCH).starts_with("invalid value 'f32' for dtype with family small_at_once")
    );
}
