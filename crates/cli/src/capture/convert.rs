//! Makes a folder with PTX, launch file and memory of a record.

use std::collections::BTreeMap;
use std::io::{Read, Seek, Write};
use std::path::{Path, PathBuf};

use capture::{Record, RecordedBuffer, protocol};
use check::launchfile::{CaptureError, LaunchError, LaunchSpec, captured};
use check::names::demangle;

use super::modules::{ModuleError, Modules};

/// A launch that has a folder.
pub struct Converted {
    pub folder: PathBuf,
    /// Bytes of its memory.
    pub bytes: usize,
}

/// Why a recorded launch cannot be checked.
#[derive(Debug, thiserror::Error)]
pub enum ConvertError {
    /// The library could not record the launch.
    #[error("{0}")]
    Refused(String),
    #[error(transparent)]
    Module(#[from] ModuleError),
    #[error("its PTX does not parse: {0}")]
    Parse(Box<ptx::ParseError>),
    #[error("the emulator does not know a part of it: {0}")]
    Unknown(Box<ptx::ParseError>),
    #[error(transparent)]
    Capture(#[from] CaptureError),
    #[error(transparent)]
    Launch(#[from] LaunchError),
    #[error("{}: {source}", path.display())]
    File { path: PathBuf, source: std::io::Error },
}

pub struct Converter<'a> {
    out: &'a Path,
    modules: Modules<'a>,
    /// Launches by the name of their folder. Several processes may launch one kernel.
    names: BTreeMap<String, usize>,
}

impl<'a> Converter<'a> {
    pub fn new(records: &'a Path, out: &'a Path, given: &'a [PathBuf]) -> Converter<'a> {
        Converter { out, modules: Modules::new(records, given), names: BTreeMap::new() }
    }

    /// Moves the memory of a record out of its folder, and writes PTX and launch file beside it.
    pub fn convert(&mut self, from: &Path, record: &Record) -> Result<Converted, ConvertError> {
        if let Some(why) = &record.refused {
            return Err(ConvertError::Refused(why.clone()));
        }
        let text = self.modules.ptx(record)?;
        let (module, left_out) =
            ptx::parse_known(&text).map_err(|error| ConvertError::Parse(Box::new(error)))?;
        if let Some(unknown) = left_out.into_iter().find(|left_out| *left_out.function == *record.kernel) {
            return Err(ConvertError::Unknown(Box::new(unknown.error)));
        }
        let mut tables = Vec::with_capacity(record.buffers.len());
        let mut changed = Vec::new();
        for (index, buffer) in record.buffers.iter().enumerate() {
            let table = addresses(from, record, buffer)?;
            // The addresses of the emulator are others, so such memory is not compared.
            if table.is_empty() && is_changed(from, buffer)? {
                changed.push(index);
            }
            tables.push(table);
        }
        let launch = captured(record, &module, &tables, &changed)?;
        // Finds what launch files do not accept, such as more memory than they may have, before the user
        // does.
        launch.text.parse::<LaunchSpec>()?;
        let folder = self.out.join(self.name(record));
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(&folder).map_err(at(&folder))?;
        for (index, (buffer, ty)) in record.buffers.iter().zip(&launch.types).enumerate() {
            let after = buffer.after.iter().filter(|_| changed.contains(&index));
            for file in std::iter::once(&buffer.file).chain(after) {
                let to = folder.join(file);
                std::fs::rename(from.join(file), &to).map_err(at(&to))?;
                let mut opened = std::fs::OpenOptions::new().write(true).open(&to).map_err(at(&to))?;
                opened.write_all(&ty.captured_header(buffer.bytes)).map_err(at(&to))?;
            }
        }
        for (name, contents) in [("kernel.ptx", &text), ("launch.toml", &launch.text)] {
            let path = folder.join(name);
            std::fs::write(&path, contents).map_err(at(&path))?;
        }
        Ok(Converted { folder, bytes: record.buffers.iter().map(|buffer| buffer.bytes).sum() })
    }

    /// The name of the launch's folder.
    fn name(&mut self, record: &Record) -> String {
        let full = demangle(&record.kernel);
        let short = full.split(['(', '<']).next().unwrap_or_default();
        let plain: String = short.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect();
        let name = format!("{}-{}", plain.trim_matches('_'), record.number);
        let again = self.names.entry(name.clone()).or_default();
        *again += 1;
        if *again == 1 { name } else { format!("{name}-{again}") }
    }
}

fn at(path: &Path) -> impl Fn(std::io::Error) -> ConvertError {
    move |source| ConvertError::File { path: path.to_path_buf(), source }
}

/// The bytes of a file of a record, without the header.
fn contents(path: &Path) -> Result<std::fs::File, ConvertError> {
    let mut file = std::fs::File::open(path).map_err(at(path))?;
    file.seek(std::io::SeekFrom::Start(protocol::HEADER as u64)).map_err(at(path))?;
    Ok(file)
}

/// The addresses of recorded memory in small memory, by their bytes.
fn addresses(
    from: &Path,
    record: &Record,
    buffer: &RecordedBuffer,
) -> Result<Vec<(usize, u64)>, ConvertError> {
    if buffer.bytes > protocol::TABLE {
        return Ok(Vec::new());
    }
    let path = from.join(&buffer.file);
    let mut bytes = Vec::new();
    contents(&path)?.read_to_end(&mut bytes).map_err(at(&path))?;
    let words = bytes.chunks_exact(8).enumerate();
    let words =
        words.map(|(index, word)| (8 * index, u64::from_le_bytes(word.try_into().unwrap_or_default())));
    Ok(words.filter(|(_, word)| record.place(*word).is_some()).collect())
}

/// Whether the launch changed the memory.
fn is_changed(from: &Path, buffer: &RecordedBuffer) -> Result<bool, ConvertError> {
    let Some(after) = &buffer.after else { return Ok(false) };
    let paths = [from.join(&buffer.file), from.join(after)];
    let [mut before, mut after] = [contents(&paths[0])?, contents(&paths[1])?];
    let (mut old, mut new) = (vec![0; 1 << 20], vec![0; 1 << 20]);
    let mut rest = buffer.bytes;
    while rest > 0 {
        let length = rest.min(old.len());
        before.read_exact(&mut old[..length]).map_err(at(&paths[0]))?;
        after.read_exact(&mut new[..length]).map_err(at(&paths[1]))?;
        if old[..length] != new[..length] {
            return Ok(true);
        }
        rest -= length;
    }
    Ok(false)
}
