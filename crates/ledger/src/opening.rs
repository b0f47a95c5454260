//! Tests of opening files: recognition, versions, permissions and a full disk.

use serde_json::Value;

use super::tests::*;
use super::*;

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
fn a_reader_leaves_no_files_beside_the_ledger() {
    let (folder, path) = scratch();
    let writer = Ledger::open(&path).unwrap();
    begin(&writer);
    drop(writer);
    let reader = Ledger::read(&path).unwrap();
    assert_eq!(reader.count("SELECT count(*) FROM run").unwrap(), 1);
    let run = Run {
        device: "L4".into(),
        config: Value::Null,
        environment: Environment::default(),
        price_per_hour: None,
    };
    assert!(reader.begin_run(&run).is_err(), "a reader writes nothing");
    drop(reader);
    let names = std::fs::read_dir(folder.path("")).unwrap().map(|entry| entry.unwrap().file_name());
    assert_eq!(names.collect::<Vec<_>>(), [path.file_name().unwrap()]);
}

#[test]
fn a_ledger_of_another_version_is_refused_with_both_versions() {
    let (_folder, path) = scratch();
    drop(Ledger::open(&path).unwrap());
    for version in [schema::VERSION - 1, schema::VERSION + 3] {
        let raw = rusqlite::Connection::open(&path).unwrap();
        raw.pragma_update(None, "user_version", version).unwrap();
        drop(raw);
        for opened in [Ledger::open(&path), Ledger::read(&path)] {
            match opened {
                Err(LedgerError::Version { found, known, .. }) => {
                    assert_eq!((found, known), (version, schema::VERSION));
                }
                other => panic!("{other:?}"),
            }
        }
    }
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
