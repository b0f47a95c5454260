//! The ledger's tables, and the upgrade of an older ledger to this version.
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

use super::checksum;

/// The letters "FCLG", by which `file` and other programs recognise a ledger.
pub const APPLICATION_ID: i64 = 0x4643_4c47;

/// Version of the schema below.
pub const VERSION: i64 = MIGRATIONS.len() as i64;

/// The upgrades from each version to the next. The first one turns an empty file into a ledger. Upgrades of
/// released versions are never edited.
const MIGRATIONS: [Step; 7] = [
    Step::Sql(include_str!("schema/1_first.sql")),
    Step::Sql(include_str!("schema/2_races.sql")),
    Step::Sql(include_str!("schema/3_ranks.sql")),
    Step::Sql(include_str!("schema/4_arms.sql")),
    Step::Sql(include_str!("schema/5_fallen.sql")),
    Step::Checksums,
    Step::Sql(include_str!("schema/7_verdicts.sql")),
];

/// An upgrade to the next version.
enum Step {
    /// An SQL script.
    Sql(&'static str),
    /// Adds a checksum to each row of every table.
    Checksums,
}

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

/// Upgrades a ledger or an empty file to this version in one transaction. A ledger of this or a newer version
/// is not changed. The function must be called outside of any transaction, because foreign keys can only be
/// switched off there.
pub(super) fn migrate(connection: &Connection) -> rusqlite::Result<()> {
    connection.pragma_update(None, "foreign_keys", false)?;
    let migrated = (|| {
        let all = Transaction::new_unchecked(connection, TransactionBehavior::Immediate)?;
        upgrade(connection, &MIGRATIONS)?;
        FACTS.into_iter().try_for_each(|table| keep(connection, table))?;
        all.commit()
    })();
    connection.pragma_update(None, "foreign_keys", true)?;
    migrated
}

/// Turns an empty file into a ledger of an earlier version.
#[cfg(test)]
pub(super) fn begin_old(connection: &Connection, version: i64) -> rusqlite::Result<()> {
    upgrade(connection, &MIGRATIONS[..version as usize])?;
    let named = |table| if table == "check_result" && version < 7 { "proof" } else { table };
    FACTS.into_iter().try_for_each(|table| keep(connection, named(table)))
}

fn upgrade(connection: &Connection, migrations: &[Step]) -> rusqlite::Result<()> {
    let version: i64 = connection.query_row("PRAGMA user_version", [], |row| row.get(0))?;
    // Another process may have upgraded the ledger in the meantime.
    if version >= migrations.len() as i64 {
        return Ok(());
    }
    for step in migrations.iter().skip(version.max(0) as usize) {
        match step {
            Step::Sql(script) => connection.execute_batch(script)?,
            Step::Checksums => checksum::add(connection)?,
        }
    }
    connection.execute_batch(&format!(
        "PRAGMA user_version = {}; PRAGMA application_id = {APPLICATION_ID};",
        migrations.len()
    ))
}

/// Adds triggers that reject every change of a table's rows.
fn keep(connection: &Connection, table: &str) -> rusqlite::Result<()> {
    for verb in ["UPDATE", "DELETE"] {
        connection.execute_batch(&format!(
            "CREATE TRIGGER IF NOT EXISTS {table}_no_{verb} BEFORE {verb} ON {table} BEGIN
               SELECT RAISE(ABORT, 'facts of the ledger are never changed');
             END;"
        ))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_older_ledger_is_brought_forward_step_by_step() {
        let connection = Connection::open_in_memory().unwrap();
        let first = || Step::Sql("CREATE TABLE a (x);");
        let both = || [first(), Step::Sql("ALTER TABLE a ADD COLUMN y; INSERT INTO a VALUES (1, 2);")];
        upgrade(&connection, &[first()]).unwrap();
        upgrade(&connection, &both()).unwrap();
        upgrade(&connection, &both()).unwrap();
        let row: (i64, i64) = connection
            .query_row("SELECT count(*), (SELECT user_version FROM pragma_user_version) FROM a", [], |row| {
                Ok((row.get(0)?, row.get(1)?))
            })
            .unwrap();
        assert_eq!(row, (1, 2), "each step once");
    }

    /// The upgrade ranks candidates by their last race. A rejection on another problem is ignored.
    #[test]
    fn an_older_ledger_is_ranked() {
        let connection = Connection::open_in_memory().unwrap();
        checksum::register(&connection).unwrap();
        upgrade(&connection, &MIGRATIONS[..2]).unwrap();
        let race = |trial: &str, problem: i64, us: f64, ratio: f64, verdict: &str| {
            format!(
                "INSERT INTO measurement (at, candidate, trial, kind, problem, samples, us, low_us, high_us, incumbent, ratio, ratio_low,
                   ratio_high, noise, verdict) VALUES (0, 2, '{trial}', 'measured', {problem}, x'', {us}, 1.0, 9.0, 1, {ratio}, {ratio} / 1.25,
                   {ratio} * 1.25, 1.0, '{verdict}');"
            )
        };
        let story = [
            "INSERT INTO problem VALUES (1, 'p'), (2, 'q'); INSERT INTO device VALUES (1, 'd'); INSERT INTO subject VALUES (1, 'h', 'b');
             INSERT INTO run VALUES (1, 0, 1, '{}', '{}', NULL);
             INSERT INTO candidate VALUES (1, 0, 1, 1, 1, 'baseline', 'a', '{}'), (2, 0, 1, 1, 1, 'evolution', 'b', '{}');
             INSERT INTO measurement (at, candidate, trial, kind, problem, samples, us, low_us, high_us)
               VALUES (0, 1, 'microbench', 'measured', 1, x'', 10.0, 9.0, 11.0), (0, 2, 'microbench', 'measured', 1, x'', 4.0, 3.0, 5.0);"
                .to_owned(),
            race("race", 1, 3.0, 2.0, "FASTER"),
            race("held_out", 1, 3.0, 1.25, "FASTER"),
            race("held_out", 2, 3.0, 0.5, "SLOWER"),
            "INSERT INTO rejection (at, candidate, stage, reason, detail) VALUES (0, 2, 'held_out', 'wrong', '')".to_owned(),
        ];
        story.iter().for_each(|facts| connection.execute_batch(facts).unwrap());
        migrate(&connection).unwrap();
        let row: String = connection
            .query_row(
                "SELECT concat_ws(' ', grade, us, low_us, high_us, coalesce(rejected, 'sound')) FROM standing WHERE candidate = 2",
                [],
                |row| row.get(0),
            )
            .unwrap();
        assert_eq!(row, "2 8.0 6.4 10.0 sound");
    }

    #[test]
    fn facts_are_never_changed() {
        let connection = Connection::open_in_memory().unwrap();
        checksum::register(&connection).unwrap();
        migrate(&connection).unwrap();
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
