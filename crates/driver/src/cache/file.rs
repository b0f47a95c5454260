//! One file of the cache.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use sha2::{Digest, Sha256};

const MAGIC: [u8; 8] = *b"FLASHCBN";
const VERSION: u32 = 1;
/// Size of the header: magic, version, key, length of the cubin, checksum of the cubin.
const HEADER: usize = 8 + 4 + 32 + 8 + 32;
/// Maximum size of a file in bytes. No cubin of this project comes near it, so a longer file is not a cubin.
const LARGEST: u64 = 64 << 20;
/// A draft of this age was left behind by a process that died.
const STALE: Duration = Duration::from_secs(3600);
const SUFFIX: &str = "cubin";

/// A hash of everything that a cubin depends on: the PTX text, the device's architecture and the compiler.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key([u8; 32]);

impl Key {
    /// The key of the PTX text `ptx`, compiled for `sm` by the driver that `compiler` names.
    pub fn new(ptx: &str, sm: u32, compiler: &str) -> Key {
        let mut hash = Sha256::new();
        hash.update(Sha256::digest(ptx));
        hash.update(sm.to_le_bytes());
        hash.update(compiler);
        Key(hash.finalize().into())
    }

    fn name(&self) -> String {
        let digits: String = self.0.iter().map(|byte| format!("{byte:02x}")).collect();
        format!("{digits}.{SUFFIX}")
    }
}

/// Why a file yields no cubin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Damage {
    /// The file does not exist or cannot be read.
    Missing,
    /// The file does not contain what was written under this key.
    Damaged,
}

/// A file in the folder.
#[derive(Debug)]
pub(super) struct Entry {
    pub path: PathBuf,
    pub bytes: u64,
    pub used: SystemTime,
}

/// The cubin in the key's file.
pub(super) fn read(folder: &Path, key: &Key) -> Result<Vec<u8>, Damage> {
    let path = folder.join(key.name());
    let file = File::open(&path).map_err(|_| Damage::Missing)?;
    // The length is checked first, so that a large foreign file is not read into memory.
    let length = file.metadata().map_err(|_| Damage::Missing)?.len();
    if !(HEADER as u64..=LARGEST).contains(&length) {
        return Err(Damage::Damaged);
    }
    let mut bytes = Vec::with_capacity(length as usize);
    (&file).take(LARGEST).read_to_end(&mut bytes).map_err(|_| Damage::Damaged)?;
    decode(key, &bytes).ok_or(Damage::Damaged)?;
    // The modification time records the last use, for the removal of old files. If it cannot be set, the time
    // of writing is used.
    let _ = file.set_modified(SystemTime::now());
    bytes.drain(..HEADER);
    Ok(bytes)
}

/// Writes the key's file, completely or not at all.
pub(super) fn write(folder: &Path, key: &Key, cubin: &[u8]) -> io::Result<()> {
    if cubin.len() as u64 + HEADER as u64 > LARGEST {
        return Err(io::Error::other("the cubin is larger than the cache takes"));
    }
    make(folder)?;
    let draft = folder.join(draft_name());
    let written = OpenOptions::new()
        .write(true)
        .create_new(true)
        .open(&draft)
        .and_then(|mut file| file.write_all(&encode(key, cubin)))
        .and_then(|()| fs::rename(&draft, folder.join(key.name())));
    if written.is_err() {
        // The first error is returned. A draft that was never created cannot be removed.
        let _ = fs::remove_file(&draft);
    }
    written
}

pub(super) fn remove(folder: &Path, key: &Key) {
    // A file that cannot be removed is rejected again by its checksum or by the driver.
    let _ = fs::remove_file(folder.join(key.name()));
}

/// Creates the folder with access for this user alone: a user who can write to it determines what the GPU
/// runs.
fn make(folder: &Path) -> io::Result<()> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(folder)
}

pub(super) fn is_writable(folder: &Path) -> bool {
    let draft = folder.join(draft_name());
    make(folder).and_then(|()| File::create_new(&draft)).and_then(|_| fs::remove_file(&draft)).is_ok()
}

/// A file name that no other thread or process uses.
fn draft_name() -> String {
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_nanos();
    format!(".{}-{}-{now}.draft", std::process::id(), COUNTER.fetch_add(1, Ordering::Relaxed))
}

/// The kernels in a folder.
pub(super) fn list(folder: &Path) -> Vec<Entry> {
    entries(folder).filter(|entry| entry.path.extension().is_some_and(|e| e == SUFFIX)).collect()
}

fn entries(folder: &Path) -> impl Iterator<Item = Entry> {
    fs::read_dir(folder).into_iter().flatten().flatten().filter_map(|entry| {
        let data = entry.metadata().ok().filter(fs::Metadata::is_file)?;
        Some(Entry { path: entry.path(), bytes: data.len(), used: data.modified().ok()? })
    })
}

/// Removes the least recently used kernels until at most `limit` bytes are left, but never `keep`. Also
/// removes drafts of processes that died. Another process may have removed a file first, which is not an
/// error.
pub(super) fn trim(folder: &Path, limit: u64, keep: &Key) {
    let now = SystemTime::now();
    for entry in entries(folder).filter(|entry| entry.path.extension().is_some_and(|e| e == "draft")) {
        if now.duration_since(entry.used).is_ok_and(|age| age > STALE) {
            let _ = fs::remove_file(&entry.path);
        }
    }
    let mut files = list(folder);
    let mut bytes: u64 = files.iter().map(|file| file.bytes).sum();
    files.retain(|file| file.path.file_name().is_none_or(|name| name.to_string_lossy() != keep.name()));
    files.sort_by_key(|file| file.used);
    for file in files {
        if bytes <= limit {
            break;
        }
        let _ = fs::remove_file(&file.path);
        bytes -= file.bytes;
    }
}

fn encode(key: &Key, cubin: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HEADER + cubin.len());
    bytes.extend(MAGIC);
    bytes.extend(VERSION.to_le_bytes());
    bytes.extend(key.0);
    bytes.extend((cubin.len() as u64).to_le_bytes());
    bytes.extend(Sha256::digest(cubin));
    bytes.extend(cubin);
    bytes
}

/// The cubin in a file's bytes, if the bytes are what [`encode`] makes for this key.
fn decode<'a>(key: &Key, bytes: &'a [u8]) -> Option<&'a [u8]> {
    let (magic, rest) = bytes.split_at_checked(8)?;
    let (version, rest) = rest.split_at_checked(4)?;
    let (written_for, rest) = rest.split_at_checked(32)?;
    let (length, rest) = rest.split_at_checked(8)?;
    let (checksum, cubin) = rest.split_at_checked(32)?;
    let sound = magic == MAGIC
        && version == VERSION.to_le_bytes()
        && written_for == key.0
        && length == (cubin.len() as u64).to_le_bytes()
        && checksum == Sha256::digest(cubin).as_slice();
    (sound && !cubin.is_empty()).then_some(cubin)
}
