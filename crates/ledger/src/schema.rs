//! The ledger's tables.
//!
//! A ledger is one SQLite file (`PRAGMA application_id` = [`APPLICATION_ID`], `PRAGMA user_version` =
//! [`VERSION`]) with its write-ahead log in the same folder. It has two kinds of tables.
//!
//! **Facts**: each row is written once, and triggers reject every UPDATE and DELETE.
//!
//! | table | a row is |
//! |---|---|
//! | `problem` | a shape that was tried; `shape` is its JSON |
//! | `device` | a device by its name |
//! | `subject` | a plan or a kernel as JSON, stored once even when several candidates share it |
//! | `run`, `run_event` | a search with its configuration and environment; its resumptions and ends |
//! | `candidate`, `parent` | a subject in a run: its arm, its operator, its changes against the first parent;
//! its parents in order |
//! | `outcome` | the result of a task: at most one per (candidate, stage, problem); rows below that came with
//! it refer to it |
//! | `screening` | hashes of PTX and SASS, resources, the niche, findings |
//! | `check_result` | what a check found: verdict, reasons, hazards, error |
//! | `measurement` | times of a candidate, every sample (`samples`: f64, little-endian, µs per call); for a
//! race also its result |
//! | `rejection` | why a candidate was rejected |
//! | `forecast`, `forecast_outcome` | a forecast time; the outcome of an idea |
//! | `recalibration` | a correction of an author's forecasts, and whether it held on later forecasts |
//! | `decision` | a decision and the figures behind it |
//! | `spending` | device time that belongs to no task |
//!
//! **Summaries** are kept by triggers, in the transaction of the fact from which they are computed. They make
//! every page and query fast on a ledger of a million candidates: `standing` (one row per candidate: last
//! stage, rank and the time by which it is ranked), `tally` (counts per run, problem and arm), `passage`
//! (outcomes counted by arm and stage), `operator_tally` (gains of operators; baselines and controls are not
//! counted), `death` (rejections counted, with the latest of each reason), `cost` (seconds counted),
//! `progress` (the candidates that were the best so far: the corners of the progress curve), `niche`
//! (elites), `pair` (each forecast with the time measured after it). Rejected candidates appear neither in
//! `progress` nor in `niche`. Summaries contain no information beyond the facts; `flashcore ledger check`
//! recomputes and compares them. The view `race` holds the times that follow from races: the incumbent's time
//! divided by the ratio.
//!
//! Each row of every table has a checksum over its columns (`checksum.rs`), which SQLite computes when the
//! row is written. Other programs can therefore read a ledger, but only this crate can write one.
//!
//! Times of writing (`at`) are milliseconds since 1970, UTC. Enumeration values are the words of the types in
//! `facts.rs`.

use rusqlite::{Connection, Transaction, TransactionBehavior};

/// The letters "FCLG", by which `file` and other programs recognise a ledger.
pub const APPLICATION_ID: i64 = 0x4643_4c47;

/// Version of the schema. Earlier versions were never released and are not read.
pub const VERSION: i64 = 8;

/// Tables whose rows are never changed. A table comes after the tables to which it refers.
pub const FACTS: [&str; 17] = [
    "problem",
    "device",
    "subject",
    "run",
    "run_event",
    "candidate",
    "parent",
    "outcome",
    "screening",
    "forecast",
    "forecast_outcome",
    "check_result",
    "measurement",
    "rejection",
    "decision",
    "spending",
    "recalibration",
];

/// Columns that hold JSON. An export writes the value, not the text.
pub const JSON: [&str; 10] = [
    "shape",
    "body",
    "config",
    "environment",
    "changes",
    "findings",
    "reasons",
    "hazards",
    "why",
    "held_out",
];

/// Turns an empty file into a ledger, in one transaction. If another process has done so in the meantime,
/// changes nothing.
pub(super) fn create(connection: &Connection) -> rusqlite::Result<()> {
    let all = Transaction::new_unchecked(connection, TransactionBehavior::Immediate)?;
    let version: i64 = connection.query_row("PRAGMA user_version", [], |row| row.get(0))?;
    if version == 0 {
        connection.execute_batch(include_str!("schema.sql"))?;
        FACTS.into_iter().try_for_each(|table| keep(connection, table))?;
        connection.execute_batch(&format!(
            "PRAGMA user_version = {VERSION}; PRAGMA application_id = {APPLICATION_ID};"
        ))?;
    }
    all.commit()
}

/// Adds triggers that reject every change of a table's rows.
fn keep(connection: &Connection, table: &str) -> rusqlite::Result<()> {
    for verb in ["UPDATE", "DELETE"] {
        connection.execute_batch(&format!(
            "CREATE TRIGGER {table}_no_{verb} BEFORE {verb} ON {table} BEGIN
               SELECT RAISE(ABORT, 'facts of the ledger are never changed');
             END;"
        ))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checksum;

    #[test]
    fn facts_are_never_changed() {
        let connection = Connection::open_in_memory().unwrap();
        checksum::register(&connection).unwrap();
        create(&connection).unwrap();
        connection.pragma_update(None, "recursive_triggers", true).unwrap();
        connection.execute("INSERT INTO device (name) VALUES ('a')", []).unwrap();
        for change in
            ["UPDATE device SET name = 'b'", "DELETE FROM device", "REPLACE INTO device VALUES (1, 'b')"]
        {
            let refused = connection.execute(change, []).unwrap_err();
            assert!(refused.to_string().contains("never changed"), "{change}");
        }
    }
}
