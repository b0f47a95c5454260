//! Tests of opening files: recognition, permissions, upgrades and a full disk.

use crate::Reason;
use serde_json::Value;

use super::tests::*;
use super::*;
use crate::Stage;
use ::check::gate::Verdict;

#[test]
fn another_writer_is_waited_for_and_then_named() {
    let (_folder, path) = scratch();
    let holder = Ledger::open(&path).unwrap();
    let waiting = Ledger::open_patient(&path, Duration::from_millis(50)).unwrap();
    let run = begin(&holder);
    let held: Result<(), LedgerError> = holder.together(|l| {
        l.event(run, RunEvent::Resumed)?;
        let refused = waiting.event(run, RunEvent::Stopped).unwrap_err();
        assert!(matches!(refused, LedgerError::Locked { seconds, .. } if seconds < 0.1), "{refused}");
        assert!(
            Ledger::read(&path).unwrap().count("SELECT count(*) FROM run").unwrap() == 1,
            "readers go on"
        );
        Ok(())
    });
    held.unwrap();
    waiting.event(run, RunEvent::Stopped).unwrap();
}

#[test]
fn what_is_no_ledger_is_told_apart() {
    let (folder, path) = scratch();
    assert!(matches!(Ledger::read(&path), Err(LedgerError::Missing { .. })));
    assert!(!path.exists(), "to read makes nothing");
    std::fs::write(&path, "").unwrap();
    for opened in [Ledger::read(&path), Ledger::open_existing(&path)] {
        assert!(matches!(opened, Err(LedgerError::Empty { .. })), "{opened:?}");
    }
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 0, "nor does it fill an empty file");
    for text in
        ["hello", "a text that is longer than the first hundred bytes of a header, so that it could be one"]
    {
        std::fs::write(&path, text).unwrap();
        assert!(matches!(Ledger::open(&path), Err(LedgerError::NotALedger { .. })), "{text}");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), text, "untouched");
    }
    assert!(matches!(Ledger::open(&folder.path("")), Err(LedgerError::NotALedger { .. })));
    let foreign = folder.path("other.db");
    rusqlite::Connection::open(&foreign).unwrap().execute_batch("CREATE TABLE a (x)").unwrap();
    let refused = Ledger::open(&foreign).unwrap_err();
    assert!(refused.to_string().contains("another program"), "{refused}");
    let nowhere = folder.path("missing/flashcore.ledger");
    assert!(matches!(Ledger::open(&nowhere), Err(LedgerError::ReadOnly { .. })));
}

#[test]
fn facts_in_the_log_are_read_where_nothing_can_be_written() {
    let (folder, path) = scratch();
    let ledger = Ledger::open(&path).unwrap();
    begin(&ledger);
    let runs = |path: &Path| Ledger::connect_unwritable(path)?.count("SELECT count(*) FROM run");
    // The files of a process that was killed: the last facts are only in the log.
    let killed = folder.path("killed");
    for suffix in ["", "-wal"] {
        let from = format!("{}{suffix}", path.display());
        std::fs::copy(from, format!("{}{suffix}", killed.display())).unwrap();
    }
    assert_eq!(runs(&killed).unwrap(), 1);
    // A process that ends has moved the facts to the ledger.
    drop(ledger);
    assert_eq!(runs(&path).unwrap(), 1);
    let files = std::fs::read_dir(folder.path("")).unwrap().count();
    assert_eq!(files, 3, "to read writes nothing");
}

#[test]
fn a_newer_ledger_is_refused_with_both_versions() {
    let (_folder, path) = scratch();
    drop(Ledger::open(&path).unwrap());
    let raw = rusqlite::Connection::open(&path).unwrap();
    raw.pragma_update(None, "user_version", schema::VERSION + 3).unwrap();
    drop(raw);
    for opened in [Ledger::open(&path), Ledger::read(&path)] {
        match opened {
            Err(LedgerError::Newer { found, known, .. }) => {
                assert_eq!((found, known), (schema::VERSION + 3, schema::VERSION));
            }
            other => panic!("{other:?}"),
        }
    }
}

/// A ledger of an older version with the facts of another ledger, stored in the same order and with the words
/// of that version: a check was called a `proof`, its stage `prove`, its verdicts `proven` and `refuted`.
fn older(path: &Path, version: i64, facts: &Ledger) -> Ledger {
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_CREATE;
    let old = Ledger::connect(path, flags, PATIENCE).unwrap();
    schema::begin_old(&old.connection, version).unwrap();
    old.connection.execute("ATTACH ? AS facts", [facts.path().to_string_lossy()]).unwrap();
    let tell = |table: &str, which: &str| {
        let sql = "SELECT group_concat(name, ', ' ORDER BY cid) FROM pragma_table_info(?, 'facts')";
        let names: String = old.connection.query_row(sql, [table], |row| row.get(0)).unwrap();
        let value = |name: &str| match (table, name) {
            (_, "stage") => "iif(stage = 'check', 'prove', stage)".to_owned(),
            ("rejection", "reason") => "iif(reason = 'failed', 'refuted', reason)".to_owned(),
            ("check_result", "verdict") => {
                "CASE verdict WHEN 'passed' THEN 'proven' WHEN 'failed' THEN 'refuted' ELSE verdict END"
                    .to_owned()
            }
            _ => name.to_owned(),
        };
        let values: Vec<String> = names.split(", ").map(value).collect();
        let (into, values) = (if table == "check_result" { "proof" } else { table }, values.join(", "));
        let sql = format!(
            "INSERT INTO main.{into} ({names}) SELECT {values} FROM facts.{table} WHERE {which} ORDER BY 1"
        );
        old.connection.execute(&sql, []).unwrap();
    };
    for table in ["problem", "device", "subject", "run", "candidate", "parent"] {
        tell(table, "true");
    }
    for outcome in 1..=facts.count("SELECT count(*) FROM outcome").unwrap() {
        tell("outcome", &format!("id = {outcome}"));
        for table in ["screening", "forecast", "check_result", "measurement", "rejection"] {
            tell(table, &format!("outcome = {outcome}"));
        }
    }
    for table in ["check_result", "rejection"] {
        tell(table, "outcome IS NULL");
    }
    old.connection.execute("DETACH facts", []).unwrap();
    old
}

/// Adds a run with every possible verdict of a check. The candidate that failed its check comes last.
fn verdicts(ledger: &Ledger) -> (RunId, [CandidateId; 6]) {
    let (run, [seed, child, wrong, crossing, control], _) = story(ledger);
    let failed = add(ledger, run, "e", Arm::Random, &[]);
    ledger.tell(&outcome(failed, Stage::Screen, screened("p6", 6.0))).unwrap();
    ledger.tell(&outcome(failed, Stage::Check, judged(Verdict::Failed))).unwrap();
    let no = |stage, reason: Reason| Rejection { stage, reason, detail: format!("it was {reason}") };
    ledger.rejected(failed, &no(Stage::Check, Reason::Failed)).unwrap();
    for candidate in [control, crossing, wrong] {
        ledger.rejected(candidate, &no(Stage::Race, Reason::Wrong)).unwrap();
    }
    (run, [seed, child, wrong, crossing, control, failed])
}

/// The upgrade replaces the words of former versions. It also computes the summaries that the older version
/// did not have.
#[test]
fn an_older_ledger_says_and_counts_what_a_new_one_does() {
    let (_new, path) = scratch();
    let new = Ledger::open(&path).unwrap();
    let (run, candidates) = verdicts(&new);
    for version in 1..schema::VERSION {
        let (_folder, path) = scratch();
        drop(older(&path, version, &new));
        let old = Ledger::open(&path).unwrap();
        for candidate in candidates {
            let (a, b) = (old.candidate(candidate).unwrap(), new.candidate(candidate).unwrap());
            assert_eq!(a.checks, b.checks, "version {version}");
            assert_eq!(a.rejections, b.rejections, "version {version}");
        }
        let told = |ledger: &Ledger| ledger.resume(run).unwrap().outcomes;
        assert_eq!(told(&old), told(&new), "version {version}");
        for table in ["standing", "tally", "cost", "passage", "death"] {
            let rows = |ledger: &Ledger| {
                let names = "SELECT group_concat(name) FROM pragma_table_info(?)";
                let names: String = ledger.connection.query_row(names, [table], |row| row.get(0)).unwrap();
                let sql = format!("SELECT group_concat(concat_ws(' ', {names}), '; ') FROM {table}");
                ledger.connection.query_row(&sql, [], |row| row.get::<_, String>(0)).unwrap()
            };
            assert_eq!(rows(&old), rows(&new), "version {version}, {table}");
        }
        assert_eq!(old.entered(run).unwrap(), new.entered(run).unwrap(), "version {version}");
        assert_eq!(old.operators(run).unwrap(), new.operators(run).unwrap(), "version {version}");
        assert_eq!(
            old.rejections_by_reason(run).unwrap(),
            new.rejections_by_reason(run).unwrap(),
            "version {version}"
        );
        assert_eq!(
            old.niches(run, &shape(128)).unwrap(),
            new.niches(run, &shape(128)).unwrap(),
            "version {version}"
        );
        let corners = |ledger: &Ledger| ledger.progress(run, &shape(128)).unwrap();
        assert_eq!(corners(&old), corners(&new), "version {version}");
        let found = old.check().unwrap();
        assert!(found.is_sound(), "version {version}: {found:?}");
        // New facts are stored with the current words.
        let (run, _) = verdicts(&old);
        assert!(old.check().unwrap().is_sound() && old.rejections_by_reason(run).unwrap().len() == 3);
    }
}

/// A ledger of the oldest version can be read completely, and reading does not change its file.
#[test]
fn an_older_ledger_is_read_and_left_as_it_is() {
    let (_new, path) = scratch();
    let new = Ledger::open(&path).unwrap();
    let (run, ids, _) = story(&new);
    for version in [1, schema::VERSION - 1] {
        let (folder, path) = scratch();
        drop(older(&path, version, &new));
        let before = std::fs::read(&path).unwrap();
        let ledger = Ledger::read(&path).unwrap();
        assert_eq!((ledger.version().unwrap(), ledger.path()), (schema::VERSION, path.as_path()));
        assert!(!ledger.topk(&shape(128), "l4", 5).unwrap().is_empty());
        assert_eq!(ledger.resume(run).unwrap().candidates.len(), ids.len());
        assert!(ledger.check().unwrap().is_sound());
        assert_eq!((ledger.runs().unwrap().len(), ledger.scores().unwrap().is_empty()), (1, false));
        drop(ledger);
        assert!(std::fs::read(&path).unwrap() == before, "it was written");
        assert_eq!(std::fs::read_dir(folder.path("")).unwrap().count(), 1, "something lies beside it");
        // Opening for writing upgrades the ledger.
        assert_eq!(Ledger::open(&path).unwrap().version().unwrap(), schema::VERSION);
    }
}

/// The upgrade computes new checksums for each table that it rewrites, so an altered row must be found
/// earlier.
#[test]
fn an_altered_row_of_an_older_ledger_is_not_brought_forward() {
    let (_new, path) = scratch();
    let new = Ledger::open(&path).unwrap();
    verdicts(&new);
    let (_folder, path) = scratch();
    drop(older(&path, schema::VERSION - 1, &new));
    let mut bytes = std::fs::read(&path).unwrap();
    let detail = b"it was failed";
    let place = bytes.windows(detail.len()).position(|part| part == detail).unwrap();
    bytes[place] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let refused = Ledger::open(&path).unwrap_err();
    assert!(matches!(refused, LedgerError::Damaged { .. }), "{refused}");
    let found = Ledger::read(&path).unwrap().check().unwrap();
    assert!(found.altered.rows == 1 && !found.is_sound(), "{found:?}");
}

#[test]
fn overwritten_pages_are_found() {
    let (_folder, path) = scratch();
    let ledger = Ledger::open(&path).unwrap();
    let run = begin(&ledger);
    for i in 0..200 {
        add(&ledger, run, &format!("{i}"), Arm::Evolution, &[]);
    }
    drop(ledger);
    let mut bytes = std::fs::read(&path).unwrap();
    let middle = bytes.len() / 2;
    bytes[4096..middle].iter_mut().for_each(|byte| *byte = 0xa5);
    std::fs::write(&path, &bytes).unwrap();
    assert!(matches!(Ledger::open(&path), Err(LedgerError::Damaged { .. })));
    bytes.iter_mut().take(100).for_each(|byte| *byte = 0);
    std::fs::write(&path, bytes).unwrap();
    assert!(matches!(Ledger::open(&path), Err(LedgerError::NotALedger { .. })));
}

/// The log is beside the ledger while a process writes, so the disk must have space for both.
#[test]
fn the_log_stays_short() {
    let (_folder, path) = scratch();
    let ledger = Ledger::open(&path).unwrap();
    let run = begin(&ledger);
    let log = format!("{}-wal", path.display());
    // A frame of the log is a page with a header of 24 bytes. The last transaction may exceed the limit.
    let most = u64::from(LOG_PAGES + 100) * (4096 + 24);
    for i in 0..300 {
        add(&ledger, run, &format!("{i}"), Arm::Evolution, &[]);
        let long = std::fs::metadata(&log).unwrap().len();
        assert!(long <= most, "{long} bytes after {i} candidates");
    }
}

#[test]
fn a_full_disk_is_told_and_survived() {
    let (_folder, path) = scratch();
    let ledger = Ledger::open(&path).unwrap();
    let run = begin(&ledger);
    let pages = ledger.count("PRAGMA page_count").unwrap();
    ledger.connection.pragma_update_and_check(None, "max_page_count", pages + 4, |_| Ok(())).unwrap();
    let full = (0..10_000).find_map(|i| {
        let candidate = subject(&"x".repeat(500 + i));
        let new = NewCandidate {
            run,
            problem: shape(64),
            candidate,
            arm: Arm::Random,
            operator: "random".into(),
            parents: vec![],
            changes: Value::Null,
        };
        ledger.add_candidate(&new).err()
    });
    assert!(matches!(full, Some(LedgerError::Full { .. })), "{full:?}");
    ledger.connection.pragma_update_and_check(None, "max_page_count", 1 << 30, |_| Ok(())).unwrap();
    add(&ledger, run, "after", Arm::Evolution, &[]);
    ledger.sound("integrity_check").unwrap();
}

#[test]
fn two_processes_may_begin_one_ledger() {
    // The interleaving of the two processes varies, so the test repeats.
    for _ in 0..20 {
        let (_folder, path) = scratch();
        let runs: Vec<RunId> = std::thread::scope(|scope| {
            let begun: Vec<_> = (0..4)
                .map(|_| {
                    scope.spawn(|| begin(&Ledger::open_patient(&path, Duration::from_secs(20)).unwrap()))
                })
                .collect();
            begun.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let mut numbers: Vec<i64> = runs.iter().map(|run| run.0).collect();
        numbers.sort_unstable();
        assert_eq!(numbers, [1, 2, 3, 4]);
    }
}
