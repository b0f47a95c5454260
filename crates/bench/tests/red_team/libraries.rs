//! Attempts of a library with host code to deceive the race.

use std::collections::{HashMap, HashSet};

use flashcore_bench::schedule::palindrome;
use flashcore_bench::{
    Entrant, Mode, NotOurs, Origin, Peaks, Race, Rules, SUSTAINED_US, SpeedVerdict, TimingFault, median, race,
};
use judge::values::Values;
use problem::{DType, Operand};

use crate::device::{CALLS, COLD_US, Device, Host, WARM_US, World, against, honest, problem, race_on};

/// The fault of the other contestant. The correct FlashCore kernel must not be disqualified.
fn fault_of(race: &Race) -> TimingFault {
    assert_eq!(race.first().fault, None);
    assert!(race.first().comparison.is_some_and(|c| c.verdict == SpeedVerdict::Undecided), "the A/A control");
    assert_eq!(race.measurements[1].comparison, None, "who is out is not compared");
    race.measurements[1].fault.clone().expect("it must be caught")
}

fn is_wrong(fault: &TimingFault) -> bool {
    matches!(fault, TimingFault::Wrong { .. })
}

#[test]
fn the_honest_are_compared() {
    for mode in Mode::ALL {
        for (factor, verdict) in
            [(1.0, SpeedVerdict::Undecided), (1.1, SpeedVerdict::Faster), (0.9, SpeedVerdict::Slower)]
        {
            let race = against(honest(factor), mode);
            let other = &race.measurements[1];
            assert_eq!((&other.fault, race.rounds), (&None, 24));
            let found = other.comparison.unwrap();
            assert_eq!(found.verdict, verdict, "{mode:?} {factor} {found:?}");
            assert_eq!(race.best_peer().map(|m| m.name.as_str()), Some("other"));
            // Two turns in each of 24 rounds; three of the samples are on new inputs.
            assert_eq!((other.samples.len(), other.times().len()), (48, 45));
            assert!(other.looked_at >= 8 && other.samples.iter().all(|s| s.reading.clock_mhz == Some(1980)));
            let takes = other.us() * f64::from(other.calls);
            let (calls, sustained) = (other.calls, takes >= 0.9 * SUSTAINED_US);
            match mode {
                Mode::Warm => assert_eq!((calls, sustained), (CALLS, false)),
                Mode::Cold => assert_eq!((calls, sustained), (1, false)),
                Mode::Sustained => {
                    assert!(sustained && calls.is_multiple_of(CALLS), "{calls} calls, {takes} µs")
                }
            }
        }
    }
}

#[test]
fn an_output_kept_for_its_pointers_is_stale() {
    let keeps = || -> Host {
        let mut kept: Option<Values> = None;
        Box::new(move |world, calls| {
            let us = if kept.is_some() { 1.0 } else { WARM_US };
            *world.out = kept.get_or_insert_with(|| world.answer()).clone();
            us * f64::from(calls)
        })
    };
    assert_eq!(fault_of(&against(keeps(), Mode::Warm)), TimingFault::Stale);
    assert_eq!(fault_of(&against(keeps(), Mode::Cold)), TimingFault::Stale);
}

/// Caches outputs by a few elements of the inputs, without a limit.
fn fingerprinting(sampled: [usize; 3]) -> Host {
    let mut kept: HashMap<[u32; 3], Values> = HashMap::new();
    Box::new(move |world, calls| {
        let key = sampled.map(|i| world.inputs[Operand::Q].get(i).unwrap().to_bits());
        let known = kept.contains_key(&key);
        *world.out = kept.entry(key).or_insert_with(|| world.answer()).clone();
        let first = if known { 1.0 } else { WARM_US };
        first + f64::from(calls - 1)
    })
}

#[test]
fn an_output_kept_for_its_inputs_is_seen_by_its_times() {
    let race =
        race_on(Device::new(vec![honest(1.0), fingerprinting([0, 77, 4095])], 2), Mode::Warm, Origin::Peer);
    assert!(matches!(fault_of(&race), TimingFault::FasterOnSeenInputs { .. }));
    let race = against(fingerprinting([0, 77, 4095]), Mode::Cold);
    assert!(matches!(fault_of(&race), TimingFault::FasterOnSeenInputs { .. }));
    // Nineteen of twenty calls return cached outputs even on new inputs; a single call on known inputs is as
    // short.
    let race = against(fingerprinting([0, 77, 4095]), Mode::Warm);
    assert!(race.measurements[1].fault.is_some());
}

#[test]
fn work_left_out_is_seen_by_the_poison() {
    let mut worked = 0;
    let idle: Host = Box::new(move |world, calls| {
        worked += 1;
        if worked == 1 {
            *world.out = world.answer();
        }
        f64::from(calls)
    });
    assert!(matches!(fault_of(&against(idle, Mode::Warm)), TimingFault::Unwritten { .. }));
}

#[test]
fn work_on_another_stream_is_not_there_when_the_event_is() {
    let elsewhere: Host = Box::new(|world, calls| {
        *world.later = Some(world.answer());
        f64::from(calls)
    });
    let fault = fault_of(&against(elsewhere, Mode::Warm));
    assert_eq!(fault, TimingFault::Unwritten { elements: 4096, of: 4096 });
    // Only half of the output is written to another place.
    let half: Host = Box::new(|world, calls| {
        let (Values::F16(right), Values::F16(out)) = (world.answer(), &mut *world.out) else {
            unreachable!()
        };
        out[..2048].copy_from_slice(&right[..2048]);
        *world.later = Some(Values::F16(right));
        WARM_US / 2.0 * f64::from(calls)
    });
    assert_eq!(fault_of(&against(half, Mode::Cold)), TimingFault::Unwritten { elements: 2048, of: 4096 });
}

/// Fills the output without computing it.
type Trick = Box<dyn Fn(&mut World)>;

#[test]
fn answers_to_zeros_and_constants_are_wrong() {
    // Constant outputs: correct for V = 0, for Q = 0 or equal keys, and for equal values.
    let zeros = |world: &mut World| *world.out = Values::zeros(DType::F16, 4096);
    let means = |world: &mut World| {
        let mean = |head: usize, d: usize| {
            (0..64).map(|row| world.inputs[Operand::V].get(head * 2048 + row * 32 + d).unwrap()).sum::<f32>()
                / 64.0
        };
        let all: Vec<f32> = (0..4096).map(|i| mean(i / 2048, i % 32)).collect();
        *world.out = Values::round(DType::F16, &all);
    };
    let copies = |world: &mut World| *world.out = world.inputs[Operand::V].clone();
    let tricks: [Trick; 3] = [Box::new(zeros), Box::new(means), Box::new(copies)];
    for trick in tricks {
        let host: Host = Box::new(move |world, calls| {
            trick(world);
            f64::from(calls)
        });
        let race = against(host, Mode::Warm);
        assert!(is_wrong(&fault_of(&race)));
        assert!(race.measurements[1].samples.is_empty(), "no time is taken of what is wrong");
    }
}

/// Every other call waits for something else, so that the median of all samples differs from the median of
/// the samples that count. The events and the host's clock agree on each call.
#[test]
fn a_busy_machine_is_no_fault() {
    let (mut calls, mut met, mut waits) = (0, HashSet::new(), true);
    let busy: Host = Box::new(move |world, batch| {
        calls += 1;
        *world.out = world.answer();
        let new = met.insert(world.inputs[Operand::Q].get(0).unwrap().to_bits());
        // One call and five turns precede the rounds. In a turn an untimed call precedes the timed one.
        waits ^= calls > 11 && calls % 2 == 1 && !new;
        let factor = if calls > 11 && (new || waits) { 3.0 } else { 1.0 };
        factor * WARM_US * f64::from(batch)
    });
    let race = against(busy, Mode::Warm);
    let other = &race.measurements[1];
    assert_eq!(other.fault, None);
    let all: Vec<f64> = other.samples.iter().map(|sample| sample.host_us).collect();
    assert!(median(&all) > 2.0 * other.us(), "the case that it is about");
}

#[test]
fn a_patched_timer_disagrees_with_the_hosts_clock() {
    let patched: Host = Box::new(|world, calls| {
        *world.timer = 0.4;
        honest(1.0)(world, calls)
    });
    assert!(matches!(fault_of(&against(patched, Mode::Warm)), TimingFault::TimerDisagrees { .. }));
}

#[test]
fn a_batch_that_is_not_worked_off_call_by_call_is_seen() {
    let batching: Host = Box::new(|world, _| honest(1.0)(world, 1));
    let fault = fault_of(&against(batching, Mode::Warm));
    assert!(matches!(fault, TimingFault::Batched { calls: CALLS, .. }), "{fault}");
}

#[test]
fn what_changes_after_the_warm_up_is_looked_at() {
    for after in [30, 200, 400] {
        let mut called = 0;
        let lazy: Host = Box::new(move |world, calls| {
            let right = honest(1.0)(world, calls);
            called += calls;
            if called < after {
                return right;
            }
            // One row of 128 is a copy of the row before it.
            let Values::F16(out) = &mut *world.out else { unreachable!() };
            out.copy_within(0..32, 32);
            right * 0.9
        });
        assert!(is_wrong(&fault_of(&against(lazy, Mode::Warm))), "after {after}");
    }
}

/// The A/A control can fail: the second entry of a kernel lies in slower memory.
#[test]
fn a_device_that_tells_equals_apart_is_told() {
    let mut turn = 0;
    let placed: Host = Box::new(move |world, calls| {
        // In cold mode a turn is one launch, and one precedes all rounds. Lane 2 is the second entry's.
        let lane = usize::checked_sub(turn, 1).and_then(|turn| {
            let lanes = palindrome(3, 1, turn as u64 / 4).into_iter();
            lanes.filter(|&lane| lane != 1).nth(turn % 4)
        });
        turn += 1;
        honest(if lane == Some(2) { 1.1 } else { 1.0 })(world, calls)
    });
    let race = race_on(Device::new(vec![placed, honest(1.0)], CALLS), Mode::Cold, Origin::Peer);
    let found = race.first().comparison.unwrap();
    assert_eq!(found.verdict, SpeedVerdict::Faster, "{found:?}");
}

#[test]
fn what_persists_in_l2_is_taken_back() {
    let persisting = || -> Host {
        Box::new(|world, calls| {
            *world.persist = true;
            honest(1.0)(world, calls)
        })
    };
    let race = against(persisting(), Mode::Cold);
    let cold = &race.measurements[1];
    assert_eq!((&cold.fault, cold.comparison.unwrap().verdict), (&None, SpeedVerdict::Undecided));
    assert!(cold.us() > WARM_US + COLD_US);
    // A device that only overwrites L2 would be deceived, so the test can fail.
    let mut naive = Device::new(vec![honest(1.0), persisting()], CALLS);
    naive.resets_persisting = false;
    assert!(race_on(naive, Mode::Cold, Origin::Peer).measurements[1].us() < WARM_US + COLD_US);
}

#[test]
fn no_one_is_faster_than_the_device() {
    let entrants = [Entrant::ours(None, CALLS)];
    // 10 µs for a kernel that cannot take less than 12 µs on this device.
    let peaks = Peaks { flops: problem().flops() / 12e-6, bandwidth: 1e12, l2: 1e6 };
    let rules = Rules::new(Mode::Warm, 0.0, Some(peaks));
    let drawn = flashcore_bench::RaceInputs::draw(&problem(), 1).unwrap();
    let race = race(&mut Device::new(vec![honest(1.0)], CALLS), &drawn, &entrants, &rules).unwrap();
    let fault = race.first().fault.clone().unwrap();
    assert!(matches!(fault, TimingFault::UnderFloor { .. }));
    let message = fault.to_string();
    assert!(message.contains("floor of 12.000 µs") && message.contains("arithmetic"), "{message}");
}

#[test]
fn a_library_cannot_carry_our_name() {
    assert_eq!(Entrant::peer("FlashCore 2", 1), Err(NotOurs("FlashCore 2".into())));
    assert_eq!(Entrant::peer("sdpa cudnn", 1).unwrap().origin, Origin::Peer);
    assert_eq!(Entrant::ours(Some("b"), 1).name, "flashcore b");
}

#[test]
fn all_may_be_out() {
    let nothing = || -> Host { Box::new(|_, _| 1.0) };
    let race = race_on(Device::new(vec![nothing(), nothing()], CALLS), Mode::Warm, Origin::Ours);
    assert!(race.measurements.iter().all(|m| matches!(m.fault, Some(TimingFault::Unwritten { .. }))));
    assert_eq!((race.rounds, race.best_peer()), (0, None));
}
