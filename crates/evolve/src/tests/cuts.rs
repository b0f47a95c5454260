//! Tests that interrupted runs end with the same result as uninterrupted ones.

use super::*;

/// A report without the ledger's path and run numbers.
pub(super) fn essence(evolution: &Evolution) -> Value {
    let mut report = json!(evolution.report());
    let object = report.as_object_mut().unwrap();
    for key in ["run", "ledger", "seconds"] {
        object.remove(key);
    }
    report
}

#[test]
fn a_run_cut_anywhere_goes_on_as_if_it_had_not_been() {
    let config = config(&Problem::mission(), 60, 3);
    let whole = Page::new("whole");
    let mut evolution = begin(&whole, &config, Limits::ALONE);
    let all =
        drive(&mut evolution, &mut Landscape { noise: 0.0, ..Landscape::new(3, &config) }, 0, usize::MAX);
    let expected = essence(&evolution);
    let facts = whole.open().resume(evolution.run()).unwrap();
    assert!(all > 80, "{all}");
    for cuts in [vec![1], vec![2], vec![7, 30], vec![20, 21, 22], vec![all / 2], vec![all - 9], vec![all - 1]]
    {
        let page = Page::new("cut");
        let mut landscape = Landscape { noise: 0.0, ..Landscape::new(3, &config) };
        let mut evolution = begin(&page, &config, Limits::ALONE);
        let run = evolution.run();
        let mut told = 0;
        for cut in &cuts {
            told += drive(&mut evolution, &mut landscape, 0, cut - told);
            // A task is handed out, and its outcome is lost.
            let _ = evolution.ask(0.0).unwrap();
            drop(evolution);
            evolution = Evolution::resume(page.open(), run, Limits::ALONE).unwrap();
        }
        told += drive(&mut evolution, &mut landscape, 0, usize::MAX);
        assert_eq!(told, all, "{cuts:?}");
        assert_eq!(essence(&evolution), expected, "{cuts:?}");
        let again = page.open().resume(run).unwrap();
        assert_eq!(again.candidates.len(), facts.candidates.len(), "{cuts:?}");
        for (one, other) in again.candidates.iter().zip(&facts.candidates) {
            assert_eq!((one.id, &one.new), (other.id, &other.new), "{cuts:?}");
        }
        assert_eq!(again.outcomes.len(), facts.outcomes.len(), "{cuts:?}");
        assert_eq!(again.decisions.len(), facts.decisions.len());
        // A finished run only reports when it is resumed.
        let mut done = Evolution::resume(page.open(), run, Limits::ALONE).unwrap();
        assert_eq!(done.ask(0.0).unwrap(), Ask::Done);
        assert_eq!(essence(&done), expected);
    }
}

/// Many tasks are open, some are lost, and they are answered in any order: no result is lost, and none counts
/// twice.
#[test]
fn crashes_with_many_under_way_lose_nothing() {
    let config = config(&Problem::mission(), 80, 4);
    let page = Page::new("many");
    let mut landscape = Landscape::new(4, &config);
    let limits = Limits::beside_device(4);
    let mut evolution = begin(&page, &config, limits);
    let run = evolution.run();
    for round in 0..40 {
        let told = drive(&mut evolution, &mut landscape, round + 1, 11);
        if told < 11 {
            break;
        }
        drop(evolution);
        evolution = Evolution::resume(page.open(), run, limits).unwrap();
    }
    assert_eq!(evolution.ask(0.0).unwrap(), Ask::Done);
    let known = page.open().resume(run).unwrap();
    let counted =
        known.candidates.iter().filter(|c| matches!(c.new.arm, Arm::Evolution | Arm::Random)).count();
    assert_eq!(counted, 80);
    let tasks: HashSet<(CandidateId, Stage, Shape)> =
        known.outcomes.iter().map(|o| (o.candidate, o.stage, o.problem)).collect();
    assert_eq!(tasks.len(), known.outcomes.len());
    assert_eq!(json!(evolution.report())["candidates"]["total"], 80);
}
