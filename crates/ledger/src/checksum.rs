//! Checksums of rows. Each table has a column `checksum`, which SQLite computes from the other columns when a
//! row is written. If a bit in the file flips later, the row no longer matches its checksum.

use rusqlite::Connection;
use rusqlite::functions::{Context, FunctionFlags};
use rusqlite::types::ValueRef;
use twox_hash::XxHash64;

use super::{Ledger, LedgerError};

/// The SQL function over a table's name and all columns but `checksum`, in the order of the table.
const FUNCTION: &str = "row_checksum";

/// Maximum number of altered rows that a check names. Further rows are only counted.
const NAMED: usize = 20;

/// Registers the SQL function with a connection. Every connection that writes or checks a ledger needs the
/// function.
pub(super) fn register(connection: &Connection) -> rusqlite::Result<()> {
    let flags =
        FunctionFlags::SQLITE_UTF8 | FunctionFlags::SQLITE_DETERMINISTIC | FunctionFlags::SQLITE_INNOCUOUS;
    connection.create_scalar_function(FUNCTION, -1, flags, |context| Ok(checksum(context)))
}

/// XXH64 over the values, each with its type and, for variable lengths, its length.
fn checksum(row: &Context<'_>) -> i64 {
    let mut bytes = Vec::with_capacity(256);
    for at in 0..row.len() {
        match row.get_raw(at) {
            ValueRef::Null => bytes.push(0),
            ValueRef::Integer(x) => {
                bytes.push(1);
                bytes.extend(x.to_le_bytes());
            }
            ValueRef::Real(x) => {
                bytes.push(2);
                // SQLite stores −0.0 as 0.0, so both must have the same checksum.
                bytes.extend((x + 0.0).to_le_bytes());
            }
            ValueRef::Text(text) => sized(&mut bytes, 3, text),
            ValueRef::Blob(blob) => sized(&mut bytes, 4, blob),
        }
    }
    XxHash64::oneshot(0, &bytes).cast_signed()
}

fn sized(bytes: &mut Vec<u8>, kind: u8, value: &[u8]) {
    bytes.push(kind);
    bytes.extend((value.len() as u64).to_le_bytes());
    bytes.extend(value);
}

/// The SQL call of the function for a table's columns.
fn call(connection: &Connection, table: &str) -> rusqlite::Result<String> {
    // `table_info` omits generated columns, and `checksum` is one.
    let sql = "SELECT group_concat(name, ', ' ORDER BY cid) FROM pragma_table_info(?)";
    let columns: String = connection.query_row(sql, [table], |row| row.get(0))?;
    Ok(format!("{FUNCTION}('{table}', {columns})"))
}

/// A table, index, trigger or view in SQLite's schema. An index that a constraint creates has no SQL text.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Part {
    kind: String,
    name: String,
    table: String,
    sql: Option<String>,
    /// The first page of a trigger or view, which is 0. Those of tables and indices differ between files.
    page: Option<i64>,
}

/// All parts in the order of their creation.
fn schema(connection: &Connection) -> rusqlite::Result<Vec<Part>> {
    let mut statement = connection.prepare(
        "SELECT type, name, tbl_name, sql, iif(type IN ('table', 'index'), NULL, rootpage)
         FROM sqlite_schema ORDER BY rowid",
    )?;
    let parts = statement.query_map([], |row| {
        let (kind, name, table) = (row.get(0)?, row.get(1)?, row.get(2)?);
        Ok(Part { kind, name, table, sql: row.get(3)?, page: row.get(4)? })
    })?;
    parts.collect()
}

/// Rows that no longer match their checksums.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Altered {
    pub rows: u64,
    /// Table and primary key of the first altered rows.
    pub named: Vec<String>,
}

impl Ledger {
    /// Compares every row of every table with its checksum, and all definitions with those of a new ledger.
    pub(super) fn altered(&self) -> Result<Altered, LedgerError> {
        let error = |e| self.error(e);
        let mut altered = Altered::default();
        let expected = expected().map_err(error)?;
        let found = schema(&self.connection).map_err(error)?;
        for part in expected.iter().filter(|part| !found.contains(part)) {
            altered.add(format!("the definition of {} {}", part.kind, part.name));
        }
        // Rows of a table with an altered definition cannot be read.
        for table in expected.iter().filter(|part| part.kind == "table" && found.contains(part)) {
            self.altered_of(&table.name, &mut altered)?;
        }
        Ok(altered)
    }

    fn altered_of(&self, table: &str, altered: &mut Altered) -> Result<(), LedgerError> {
        let error = |e| self.error(e);
        let sum = call(&self.connection, table).map_err(error)?;
        let key = "SELECT group_concat(format('''%s '', %s', name, name), ', '', '', ' ORDER BY pk)
             FROM pragma_table_info(?) WHERE pk > 0";
        let key: String = self.connection.query_row(key, [table], |row| row.get(0)).map_err(error)?;
        let sql = format!("SELECT concat({key}) FROM {table} NOT INDEXED WHERE checksum IS NOT {sum}");
        let mut statement = self.connection.prepare(&sql).map_err(error)?;
        let mut rows = statement.query([]).map_err(error)?;
        while let Some(row) = rows.next().map_err(error)? {
            // A flipped bit may have made the text invalid UTF-8.
            let name = match row.get_ref(0).map_err(error)? {
                ValueRef::Text(name) => String::from_utf8_lossy(name).into_owned(),
                _ => String::new(),
            };
            altered.add(format!("{table}: {name}"));
        }
        Ok(())
    }
}

impl Altered {
    fn add(&mut self, name: String) {
        self.rows += 1;
        if self.named.len() < NAMED {
            self.named.push(name);
        }
    }
}

impl std::fmt::Display for Altered {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.named.join("; "))?;
        match self.rows - self.named.len() as u64 {
            0 => Ok(()),
            more => write!(f, "; {more} more"),
        }
    }
}

/// The definitions of a new ledger.
fn expected() -> rusqlite::Result<Vec<Part>> {
    let new = Connection::open_in_memory()?;
    register(&new)?;
    super::schema::create(&new)?;
    schema(&new)
}
