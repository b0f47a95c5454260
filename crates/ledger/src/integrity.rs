//! Tests of damage: single flipped bits in the file, and a file that is deleted or replaced while a process
//! writes to it.

use std::collections::HashMap;
use std::path::Path;

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use rusqlite::types::Value;

use super::tests::*;
use super::*;

/// Every value of every table and all definitions, as SQLite reads them from a file.
fn contents(path: &Path) -> Option<HashMap<String, Vec<Vec<Value>>>> {
    let connection = Connection::open(path).ok()?;
    let mut all = HashMap::new();
    let tables: Vec<String> = {
        let sql = "SELECT name FROM sqlite_schema WHERE type = 'table'";
        let mut names = connection.prepare(sql).ok()?;
        names.query_map([], |row| row.get(0)).ok()?.collect::<Result<_, _>>().ok()?
    };
    for table in tables.iter().map(String::as_str).chain(["sqlite_schema"]) {
        let mut statement = connection.prepare(&format!("SELECT * FROM {table} NOT INDEXED")).ok()?;
        let width = statement.column_count();
        let rows = statement.query_map([], |row| (0..width).map(|at| row.get(at)).collect()).ok()?;
        all.insert(table.to_owned(), rows.collect::<Result<_, _>>().ok()?);
    }
    Some(all)
}

/// A ledger with rows in every kind of table, in a single file without a write-ahead log.
fn filled() -> (Scratch, PathBuf) {
    let (folder, path) = scratch();
    let ledger = Ledger::open(&path).unwrap();
    for _ in 0..4 {
        let (run, ids, _) = story(&ledger);
        let promoted = Decision {
            what: "promoted".into(),
            candidate: Some(ids[0]),
            why: serde_json::json!({ "ratio": 1.25 }),
        };
        ledger.decided(run, &promoted).unwrap();
        ledger.spent(run, 12.5, "waiting").unwrap();
    }
    ledger.connection.execute_batch("PRAGMA wal_checkpoint(TRUNCATE)").unwrap();
    drop(ledger);
    (folder, path)
}

/// The result of `flashcore ledger check` for a file.
fn is_sound(path: &Path) -> bool {
    Ledger::read(path).and_then(|ledger| ledger.check()).is_ok_and(|found| found.is_sound())
}

#[test]
fn every_flipped_bit_that_changes_a_value_is_found() {
    let (folder, path) = filled();
    assert!(is_sound(&path));
    let (whole, before) = (std::fs::read(&path).unwrap(), contents(&path).unwrap());
    assert!(before.len() > 25, "{}", before.len());
    let mut rng = SmallRng::seed_from_u64(13);
    let (mut changed, mut unseen) = (0, Vec::new());
    for _ in 0..400 {
        let (at, bit) = (rng.random_range(100..whole.len()), rng.random_range(0..8));
        let mut bytes = whole.clone();
        bytes[at] ^= 1 << bit;
        let copy = folder.path("copy");
        std::fs::write(&copy, &bytes).unwrap();
        // A file that cannot be read completely counts as changed.
        if contents(&copy).as_ref() == Some(&before) {
            continue;
        }
        changed += 1;
        if is_sound(&copy) {
            unseen.push((at, bit));
        }
    }
    assert!(changed > 60, "{changed}");
    assert!(unseen.is_empty(), "{} of {changed} are not found: {unseen:?}", unseen.len());
}

/// Replaces a text that occurs exactly once in a file.
fn replace(path: &Path, old: &[u8], new: &[u8]) {
    let mut bytes = std::fs::read(path).unwrap();
    let places: Vec<usize> =
        bytes.windows(old.len()).enumerate().filter(|(_, part)| *part == old).map(|(at, _)| at).collect();
    assert_eq!(places.len(), 1, "{places:?}");
    bytes[places[0]..][..new.len()].copy_from_slice(new);
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn an_altered_row_is_named() {
    let (_folder, path) = scratch();
    let ledger = Ledger::open(&path).unwrap();
    let (run, ..) = story(&ledger);
    for what in ["one", "two", "three"] {
        ledger
            .decided(run, &Decision { what: what.into(), candidate: None, why: serde_json::json!({}) })
            .unwrap();
    }
    ledger.connection.execute_batch("PRAGMA wal_checkpoint(TRUNCATE)").unwrap();
    drop(ledger);
    replace(&path, b"three", b"tiree");
    let ledger = Ledger::read(&path).unwrap();
    let found = ledger.check().unwrap();
    let id = ledger.count("SELECT id FROM decision WHERE what = 'tiree'").unwrap();
    assert_eq!((found.altered.rows, &found.altered.named), (1, &vec![format!("decision: id {id}")]));
    let refused = ledger.require_sound().unwrap_err();
    assert!(matches!(refused, LedgerError::Damaged { .. }), "{refused}");
    assert!(
        refused.to_string().contains(&format!("altered since it was written: decision: id {id}. Restore"))
    );
}

#[test]
fn a_text_that_is_not_utf_8_is_damage_and_exported_in_part() {
    let (folder, path) = scratch();
    let ledger = Ledger::open(&path).unwrap();
    let (run, ..) = story(&ledger);
    for what in ["first", "strange", "last"] {
        let decision = Decision { what: what.into(), candidate: None, why: serde_json::json!({}) };
        ledger.decided(run, &decision).unwrap();
    }
    ledger.connection.execute_batch("PRAGMA wal_checkpoint(TRUNCATE)").unwrap();
    drop(ledger);
    replace(&path, b"strange", b"str\xff\xfege");
    let ledger = Ledger::read(&path).unwrap();
    let read = ledger.rows("SELECT what FROM decision", [], |row| row.get::<_, String>(0));
    assert!(matches!(read, Err(LedgerError::Damaged { .. })), "{read:?}");
    for (format, name) in [(Format::JsonLines, "facts.jsonl"), (Format::Parquet, "facts")] {
        let exported = ledger.export(&folder.path(name), format).unwrap();
        let damaged: Vec<_> = exported.iter().filter(|table| table.broken.is_some()).collect();
        let [decisions] = damaged.as_slice() else { panic!("{damaged:?}") };
        let broken = decisions.broken.as_deref().unwrap();
        assert_eq!(decisions.table, "decision");
        assert!(broken.starts_with("the what of row ") && broken.ends_with(" is not UTF-8"), "{broken}");
    }
    let facts = std::fs::read_to_string(folder.path("facts.jsonl")).unwrap();
    assert!(facts.contains("\"str\u{fffd}\u{fffd}ge\"") && facts.contains("\"last\""), "{facts}");
}

/// Values whose stored form may differ from the written form still match their checksums when they are read
/// back.
#[test]
fn values_are_the_same_when_they_are_read_back() {
    let (_folder, path) = scratch();
    let ledger = Ledger::open(&path).unwrap();
    let run = begin(&ledger);
    for seconds in [0.0, -0.0, 1.0, 1e15, 0.1, 5e-324, f64::MAX] {
        ledger.spent(run, seconds, "ä\u{0}ß").unwrap();
    }
    assert!(ledger.check().unwrap().is_sound());
}

#[cfg(unix)]
#[test]
fn a_file_that_is_deleted_or_replaced_is_told() {
    let (folder, path) = scratch();
    let ledger = Ledger::open(&path).unwrap();
    let run = begin(&ledger);
    std::fs::rename(&path, folder.path("elsewhere")).unwrap();
    let gone = ledger.event(run, RunEvent::Stopped).unwrap_err();
    assert!(matches!(gone, LedgerError::Gone { what: "deleted", .. }), "{gone}");
    assert!(gone.to_string().contains("flashcore.ledger-wal"), "{gone}");
    std::fs::write(&path, "").unwrap();
    let gone = ledger.event(run, RunEvent::Stopped).unwrap_err();
    assert!(matches!(gone, LedgerError::Gone { what: "replaced by another file", .. }), "{gone}");
    // The change of the file is also detected while a transaction is open.
    std::fs::rename(folder.path("elsewhere"), &path).unwrap();
    let gone = ledger
        .together(|ledger| {
            ledger.event(run, RunEvent::Stopped)?;
            std::fs::remove_file(&path).map_err(|source| LedgerError::File { path: path.clone(), source })
        })
        .unwrap_err();
    assert!(matches!(gone, LedgerError::Gone { what: "deleted", .. }), "{gone}");
}
