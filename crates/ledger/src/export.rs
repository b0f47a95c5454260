//! Exports the facts for other programs, as JSON lines or as one Parquet file per table. Summaries are not
//! exported, because they can be computed from the facts.

use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use parquet::column::writer::ColumnWriter;
use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::errors::ParquetError;
use parquet::file::properties::WriterProperties;
use parquet::file::writer::{SerializedFileWriter, SerializedRowGroupWriter};
use parquet::schema::parser::parse_message_type;
use rusqlite::types::{Type, ValueRef};
use serde::Serialize;
use serde_json::{Value, json};

use super::read::samples;
use super::schema::{FACTS, JSON};
use super::{Ledger, LedgerError};
use host::store::{Draft, StoreError};

/// The format of an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// One file: an object per line, with its table's name as `table`.
    JsonLines,
    /// A folder with `TABLE.parquet` for each table. Samples are lists of doubles; plans and other structures
    /// are JSON.
    Parquet,
}

/// The export of one table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Exported {
    pub table: &'static str,
    /// Number of rows written.
    pub rows: u64,
    /// The damage at which the export of this table stopped, or else the first text that is not UTF-8: its
    /// row is written with replacement characters.
    pub broken: Option<String>,
}

/// Rows per row group of a Parquet file. Limits the memory that an export uses.
const GROUP: usize = 20_000;

impl Ledger {
    /// Writes all facts in one consistent state. From a damaged ledger, the readable rows are written, and
    /// [`Exported::broken`] says where they end.
    ///
    /// # Errors
    /// When the file or folder cannot be written, or the ledger cannot be read.
    pub fn export(&self, to: &Path, format: Format) -> Result<Vec<Exported>, LedgerError> {
        let moment = self.connection.unchecked_transaction().map_err(|e| self.error(e))?;
        let exported = match format {
            Format::JsonLines => {
                let mut draft = Draft::new(to)?;
                let exported = FACTS
                    .into_iter()
                    .map(|table| self.table(table, &mut Lines { table, to, out: &mut draft }))
                    .collect::<Result<Vec<_>, _>>()?;
                draft.keep()?;
                exported
            }
            Format::Parquet => {
                std::fs::create_dir_all(to).map_err(|e| failed(to, e))?;
                FACTS.into_iter().map(|table| self.parquet(table, to)).collect::<Result<Vec<_>, _>>()?
            }
        };
        moment.finish().map_err(|e| self.error(e))?;
        Ok(exported)
    }

    fn parquet(&self, table: &'static str, folder: &Path) -> Result<Exported, LedgerError> {
        let path = folder.join(format!("{table}.parquet"));
        let draft = Draft::new(&path)?;
        let mut sink = Columns::new(table, &path, draft, &self.columns(table)?)?;
        let exported = self.table(table, &mut sink)?;
        sink.end()?.keep()?;
        Ok(exported)
    }

    fn table(&self, table: &'static str, sink: &mut impl Sink) -> Result<Exported, LedgerError> {
        let columns = self.columns(table)?;
        let mut exported = Exported { table, rows: 0, broken: None };
        let written = self.each_row(&columns, sink, &mut exported);
        match written {
            // The readable rows of a damaged table are exported.
            Err(LedgerError::Damaged { what, .. }) => exported.broken = Some(what),
            other => other?,
        }
        Ok(exported)
    }

    fn each_row(
        &self,
        columns: &[Column],
        sink: &mut impl Sink,
        exported: &mut Exported,
    ) -> Result<(), LedgerError> {
        let names: Vec<&str> = columns.iter().map(|column| column.name.as_str()).collect();
        let sql = format!("SELECT {} FROM {} ORDER BY 1, 2", names.join(", "), exported.table);
        let mut statement = self.connection.prepare(&sql).map_err(|e| self.error(e))?;
        let mut rows = statement.query([]).map_err(|e| self.error(e))?;
        while let Some(row) = rows.next().map_err(|e| self.error(e))? {
            for (at, column) in columns.iter().enumerate() {
                let value = row.get_ref(at).map_err(|e| self.error(e))?;
                if value.data_type() == Type::Text && value.as_str().is_err() {
                    let what = format!("the {} of row {} is not UTF-8", column.name, exported.rows + 1);
                    exported.broken.get_or_insert(what);
                }
                sink.value(at, column, value)?;
            }
            sink.row()?;
            exported.rows += 1;
        }
        Ok(())
    }

    fn columns(&self, table: &str) -> Result<Vec<Column>, LedgerError> {
        // `table_info` omits generated columns, so checksums are not exported.
        let sql = "SELECT name, type, \"notnull\" OR pk > 0 FROM pragma_table_info(?) ORDER BY cid";
        self.rows(sql, [table], |row| {
            let (name, declared): (String, String) = (row.get(0)?, row.get(1)?);
            let kind = match declared.as_str() {
                "INTEGER" => Kind::Integer,
                "REAL" => Kind::Real,
                "BLOB" => Kind::Samples,
                _ if JSON.contains(&name.as_str()) => Kind::Json,
                _ => Kind::Text,
            };
            Ok(Column { name, kind, required: row.get(2)? })
        })
    }
}

#[derive(Debug)]
struct Column {
    name: String,
    kind: Kind,
    required: bool,
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Integer,
    Real,
    Text,
    Json,
    /// f64 values, little-endian.
    Samples,
}

/// Receives rows value by value.
trait Sink {
    fn value(&mut self, at: usize, column: &Column, value: ValueRef<'_>) -> Result<(), LedgerError>;
    fn row(&mut self) -> Result<(), LedgerError>;
}

struct Lines<'a> {
    table: &'static str,
    to: &'a Path,
    out: &'a mut Draft,
}

impl Sink for Lines<'_> {
    fn value(&mut self, at: usize, column: &Column, value: ValueRef<'_>) -> Result<(), LedgerError> {
        let value = match (column.kind, value) {
            (_, ValueRef::Null) => Value::Null,
            (_, ValueRef::Integer(x)) => json!(x),
            (_, ValueRef::Real(x)) => json!(x),
            (_, ValueRef::Blob(bytes)) => json!(samples(bytes)),
            (kind, ValueRef::Text(bytes)) => {
                let text = String::from_utf8_lossy(bytes);
                match kind {
                    // Invalid JSON means damage; the export keeps its text.
                    Kind::Json => serde_json::from_str(&text).unwrap_or_else(|_| json!(text)),
                    _ => json!(text),
                }
            }
        };
        let opening = if at == 0 { format!("{{\"table\":\"{}\"", self.table) } else { String::new() };
        write!(self.out, "{opening},{}:{value}", json!(column.name)).map_err(|e| failed(self.to, e))
    }

    fn row(&mut self) -> Result<(), LedgerError> {
        writeln!(self.out, "}}").map_err(|e| failed(self.to, e))
    }
}

/// A Parquet file. Rows are collected by column until a row group is full.
struct Columns<'a> {
    path: &'a Path,
    writer: SerializedFileWriter<Draft>,
    gathered: Vec<Gathered>,
    rows: usize,
}

/// The values of a column with Parquet's definition and repetition levels (Dremel), which mark missing values
/// and the beginnings of lists.
#[derive(Default)]
struct Gathered {
    required: bool,
    integers: Vec<i64>,
    reals: Vec<f64>,
    texts: Vec<ByteArray>,
    definition: Vec<i16>,
    repetition: Vec<i16>,
}

impl<'a> Columns<'a> {
    fn new(
        table: &str,
        path: &'a Path,
        draft: Draft,
        columns: &[Column],
    ) -> Result<Columns<'a>, LedgerError> {
        let fields: Vec<String> = columns.iter().map(Column::field).collect();
        let message = format!("message {table} {{ {} }}", fields.join(" "));
        let properties = WriterProperties::builder()
            .set_compression(parquet::basic::Compression::SNAPPY)
            .set_created_by("flashcore".to_owned());
        let writer = parse_message_type(&message)
            .and_then(|schema| {
                SerializedFileWriter::new(draft, Arc::new(schema), Arc::new(properties.build()))
            })
            .map_err(|e| broken(path, e))?;
        let gathered =
            columns.iter().map(|c| Gathered { required: c.required, ..Gathered::default() }).collect();
        Ok(Columns { path, writer, gathered, rows: 0 })
    }

    fn flush(&mut self) -> Result<(), LedgerError> {
        if self.rows == 0 {
            return Ok(());
        }
        self.rows = 0;
        let mut write = || -> Result<(), ParquetError> {
            let mut group = self.writer.next_row_group()?;
            self.gathered.iter_mut().try_for_each(|column| column.write(&mut group))?;
            group.close()?;
            Ok(())
        };
        write().map_err(|e| broken(self.path, e))
    }

    fn end(mut self) -> Result<Draft, LedgerError> {
        self.flush()?;
        self.writer.into_inner().map_err(|e| broken(self.path, e))
    }
}

impl Sink for Columns<'_> {
    fn value(&mut self, at: usize, _: &Column, value: ValueRef<'_>) -> Result<(), LedgerError> {
        let column = &mut self.gathered[at];
        match value {
            ValueRef::Null => column.level(0),
            ValueRef::Integer(x) => {
                column.level(1);
                column.integers.push(x);
            }
            ValueRef::Real(x) => {
                column.level(1);
                column.reals.push(x);
            }
            ValueRef::Text(bytes) => {
                column.level(1);
                column.texts.push(ByteArray::from(&*String::from_utf8_lossy(bytes)));
            }
            ValueRef::Blob(bytes) => {
                let samples = samples(bytes);
                column.repetition.push(0);
                column.definition.push(i16::from(!samples.is_empty()));
                for _ in 1..samples.len() {
                    column.repetition.push(1);
                    column.definition.push(1);
                }
                column.reals.extend(samples);
            }
        }
        Ok(())
    }

    fn row(&mut self) -> Result<(), LedgerError> {
        self.rows += 1;
        if self.rows == GROUP { self.flush() } else { Ok(()) }
    }
}

impl Gathered {
    fn level(&mut self, level: i16) {
        if !self.required {
            self.definition.push(level);
        }
    }

    fn write(&mut self, group: &mut SerializedRowGroupWriter<'_, Draft>) -> Result<(), ParquetError> {
        let levels = |levels: &[i16]| (!levels.is_empty()).then(|| levels.to_vec());
        let (definition, repetition) = (levels(&self.definition), levels(&self.repetition));
        let (definition, repetition) = (definition.as_deref(), repetition.as_deref());
        let Some(mut column) = group.next_column()? else {
            return Err(ParquetError::General("more columns than the schema has".to_owned()));
        };
        match column.untyped() {
            ColumnWriter::Int64ColumnWriter(typed) => {
                typed.write_batch(&self.integers, definition, repetition)?;
            }
            ColumnWriter::DoubleColumnWriter(typed) => {
                typed.write_batch(&self.reals, definition, repetition)?;
            }
            _ => {
                column.typed::<ByteArrayType>().write_batch(&self.texts, definition, repetition)?;
            }
        }
        column.close()?;
        *self = Gathered { required: self.required, ..Gathered::default() };
        Ok(())
    }
}

impl Column {
    /// The column in Parquet's schema language.
    fn field(&self) -> String {
        let (repetition, name) = (if self.required { "REQUIRED" } else { "OPTIONAL" }, &self.name);
        match self.kind {
            Kind::Integer => format!("{repetition} INT64 {name};"),
            Kind::Real => format!("{repetition} DOUBLE {name};"),
            Kind::Text => format!("{repetition} BYTE_ARRAY {name} (UTF8);"),
            Kind::Json => format!("{repetition} BYTE_ARRAY {name} (JSON);"),
            Kind::Samples => format!(
                "{repetition} GROUP {name} (LIST) {{ REPEATED GROUP list {{ REQUIRED DOUBLE element; }} }}"
            ),
        }
    }
}

fn failed(path: &Path, source: std::io::Error) -> LedgerError {
    LedgerError::File { path: path.to_path_buf(), source }
}

fn broken(path: &Path, error: ParquetError) -> LedgerError {
    failed(path, std::io::Error::other(error))
}

impl From<StoreError> for LedgerError {
    fn from(error: StoreError) -> LedgerError {
        match error {
            StoreError::Read { path, source } | StoreError::Write { path, source } => {
                LedgerError::File { path, source }
            }
        }
    }
}
