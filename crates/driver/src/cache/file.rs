//! One file of the cache.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use sha2::{Digest, Sha256};

const MAGIC: [u8; 8] = *b"FLASHCBN";
const VERSION: u32 = 1;
/// Magic, version, key, length of the cubin, checksum of the cubin.
const HEADER: usize = 8 + 4 + 32 + 8 + 32;
/// No cubin of ours comes near this; a file that is longer is none.
const LARGEST: u64 = 64 << 20;
/// A draft this old was left behind by a process that died.
const STALE: Duration = Duration::from_secs(3600);
const SUFFIX: &str = "cubin";

/// What a cubin depends on: the PTX text, the device's architecture, and the compiler.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key([u8; 32]);

impl Key {
    /// The key of PTX text compiled for `sm` by the driver that `compiler` names.
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

/// Why a file gives no cubin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Damage {
    /// It is not there, or cannot be read.
    Missing,
    /// It is not what was written under this key.
    Damaged,
}

/// A file of the folder.
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
    // The length first: what is no file of ours is not read into memory.
    let length = file.metadata().map_err(|_| Damage::Missing)?.len();
    if !(HEADER as u64..=LARGEST).contains(&length) {
        return Err(Damage::Damaged);
    }
    let mut bytes = Vec::with_capacity(length as usize);
    (&file).take(LARGEST).read_to_end(&mut bytes).map_err(|_| Damage::Damaged)?;
    decode(key, &bytes).ok_or(Damage::Damaged)?;
    // The time of its last use decides who goes first; where it cannot be set, the time of writing does.
    let _ = file.set_modified(SystemTime::now());
    bytes.drain(..HEADER);
    Ok(bytes)
}

/// Writes the key's file, whole or not at all.
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
        // The first error is the one that counts; a draft that never came to be cannot be removed.
        let _ = fs::remove_file(&draft);
    }
    written
}

pub(super) fn remove(folder: &Path, key: &Key) {
    // Where it cannot be removed, its checksum or the driver will refuse it again.
    let _ = fs::remove_file(folder.join(key.name()));
}

/// Makes the folder, for this user alone: who can write to it chooses what the GPU runs.
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

/// A name that no other thread or process writes under.
fn draft_name() -> String {
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_nanos();
    format!(".{}-{}-{now}.draft", std::process::id(), COUNTER.fetch_add(1, Ordering::Relaxed))
}

/// The kernels of a folder.
pub(super) fn list(folder: &Path) -> Vec<Entry> {
    entries(folder).filter(|entry| entry.path.extension().is_some_and(|e| e == SUFFIX)).collect()
}

fn entries(folder: &Path) -> impl Iterator<Item = Entry> {
    fs::read_dir(folder).into_iter().flatten().flatten().filter_map(|entry| {
        let data = entry.metadata().ok().filter(fs::Metadata::is_file)?;
        Some(Entry { path: entry.path(), bytes: data.len(), used: data.modified().ok()? })
    })
}

/// Removes the kernels that were not used longest until `limit` bytes are left, but not `keep`; also drafts of processes
/// that died. Another process may have removed a file before; that is as good.
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

/// The cubin in a file's bytes, if they are what [`encode`] made for this key.
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
