use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, SystemTime};

use super::{CacheStats, CubinCache, Key, file, folder_of};

/// A temporary folder, removed when dropped.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("flashcore-cache-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        Folder(path)
    }

    fn cache(&self) -> CubinCache {
        CubinCache::new(Some(self.0.clone()), 1 << 20)
    }

    /// The only file in the folder.
    fn file(&self) -> PathBuf {
        let files = file::list(&self.0);
        assert_eq!(files.len(), 1, "{files:?}");
        files[0].path.clone()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn key(text: &str) -> Key {
    Key::new(text, 90, "13000 580.159.04")
}

fn cubin(seed: u8, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|i| (i as u8).wrapping_mul(31) ^ seed).collect()
}

#[test]
fn what_was_put_is_there_for_the_next_process() {
    let folder = Folder::new("round-trip");
    let cache = folder.cache();
    assert_eq!(cache.get(&key("a")), None);
    cache.put(&key("a"), &cubin(1, 5000));
    assert_eq!(folder.cache().get(&key("a")), Some(cubin(1, 5000)));
    assert_eq!(cache.get(&key("a")), Some(cubin(1, 5000)));
    cache.put(&key("a"), &cubin(2, 50));
    assert_eq!(cache.get(&key("a")), Some(cubin(2, 50)));
    let expected = CacheStats { hits: 2, misses: 1, stored: 2, damaged: 0, unwritable: 0 };
    assert_eq!(cache.stats(), expected);
    let usage = cache.usage();
    assert_eq!((usage.writable, usage.entries, usage.bytes), (true, 1, 50 + 84));
}

#[test]
fn a_key_tells_text_architecture_and_compiler_apart() {
    let keys = [key("a"), key("b"), Key::new("a", 80, "13000 580.159.04"), Key::new("a", 90, "13000 -")];
    for (i, a) in keys.iter().enumerate() {
        assert!(keys[i + 1..].iter().all(|b| a != b));
    }
}

type Damage = fn(&mut Vec<u8>);

#[test]
fn a_damaged_file_is_refused_and_replaced() {
    let damages: [(&str, Damage); 8] = [
        ("torn in the cubin", |b| b.truncate(1000)),
        ("torn in the header", |b| b.truncate(50)),
        ("nothing in it", Vec::clear),
        ("longer than it says", |b| b.push(0)),
        ("one bit of the cubin", |b| b[700] ^= 4),
        ("one bit of the checksum", |b| b[60] ^= 1),
        ("another version", |b| b[8] = 9),
        ("a length beyond memory", |b| b[44..52].fill(0xff)),
    ];
    let folder = Folder::new("damage");
    let cache = folder.cache();
    for (i, (name, damage)) in damages.into_iter().enumerate() {
        cache.put(&key("a"), &cubin(3, 2000));
        let path = folder.file();
        let mut bytes = std::fs::read(&path).unwrap();
        damage(&mut bytes);
        std::fs::write(&path, bytes).unwrap();
        assert_eq!(cache.get(&key("a")), None, "{name}");
        assert_eq!(cache.stats().damaged, i as u64 + 1, "{name}");
        cache.put(&key("a"), &cubin(4, 2000));
        assert_eq!(cache.get(&key("a")), Some(cubin(4, 2000)), "{name}");
    }
}

#[test]
fn a_file_under_another_keys_name_is_refused() {
    let folder = Folder::new("foreign");
    let cache = folder.cache();
    cache.put(&key("a"), &cubin(5, 100));
    let a = folder.file();
    cache.put(&key("b"), &cubin(6, 100));
    let b = file::list(&folder.0).into_iter().map(|f| f.path).find(|path| *path != a).unwrap();
    std::fs::copy(&a, &b).unwrap();
    assert_eq!((cache.get(&key("b")), cache.stats().damaged), (None, 1));
    assert_eq!(cache.get(&key("a")), Some(cubin(5, 100)));
    cache.reject(&key("a"));
    assert_eq!((cache.get(&key("a")), cache.stats().damaged), (None, 2));
}

#[test]
fn a_huge_file_is_not_read() {
    let folder = Folder::new("huge");
    let cache = folder.cache();
    cache.put(&key("a"), &cubin(7, 100));
    // A sparse file of 1 TiB.
    std::fs::OpenOptions::new().write(true).open(folder.file()).unwrap().set_len(1 << 40).unwrap();
    assert_eq!((cache.get(&key("a")), cache.stats().damaged), (None, 1));
}

#[test]
fn a_folder_that_cannot_be_written_is_counted_and_no_error() {
    let folder = Folder::new("unwritable");
    std::fs::create_dir_all(&folder.0).unwrap();
    let occupied = folder.0.join("a-file");
    std::fs::write(&occupied, b"").unwrap();
    // Four unusable folders: its place is taken by a file, its parent is a file, its parent is not writable
    // for anyone, and no folder is named. (Root can write to folders whose mode forbids it, so a mode is not
    // tested here.)
    for place in [Some(occupied.clone()), Some(occupied.join("below")), Some("/proc/flashcore".into()), None]
    {
        let cache = CubinCache::new(place.clone(), 1 << 20);
        cache.put(&key("a"), &cubin(8, 100));
        assert_eq!(cache.get(&key("a")), None, "{place:?}");
        let expected = CacheStats { misses: 1, unwritable: 1, ..CacheStats::default() };
        assert_eq!(cache.stats(), expected, "{place:?}");
        assert!(!cache.usage().writable, "{place:?}");
    }
}

const LIMITED: &str = "FLASHCORE_TEST_CACHE_LIMITED";

/// The child of the next test: it runs in a process in which no file may grow beyond 512 bytes or 1 KiB. Does
/// nothing otherwise.
#[test]
fn limited_child() {
    let Some(folder) = std::env::var_os(LIMITED) else { return };
    let cache = CubinCache::new(Some(folder.into()), 1 << 20);
    cache.put(&key("large"), &cubin(1, 5000));
    cache.put(&key("small"), &cubin(2, 100));
    assert_eq!((cache.get(&key("large")), cache.get(&key("small"))), (None, Some(cubin(2, 100))));
    let expected = CacheStats { hits: 1, misses: 1, stored: 1, unwritable: 1, ..CacheStats::default() };
    assert_eq!(cache.stats(), expected);
}

/// A disk that becomes full during a write behaves like a limit on the file size: a part is written, then an
/// error is returned. The part is removed, and the previous file stays.
#[cfg(unix)]
#[test]
fn a_write_that_runs_out_of_room_leaves_nothing() {
    let folder = Folder::new("room");
    folder.cache().put(&key("before"), &cubin(7, 3000));
    let mut shell = Command::new("sh");
    shell.args(["-c", "ulimit -f 1; trap '' XFSZ; exec \"$0\" --exact cache::tests::limited_child"]);
    let child = shell.arg(std::env::current_exe().unwrap()).env(LIMITED, &folder.0).output().unwrap();
    assert!(child.status.success(), "{}", String::from_utf8_lossy(&child.stdout));
    assert_eq!(std::fs::read_dir(&folder.0).unwrap().count(), 2, "the draft is still there");
    assert_eq!(folder.cache().get(&key("before")), Some(cubin(7, 3000)));
}

/// Files in a read-only folder are used, and kernels that are not there are compiled each time. (Root can
/// write to the folder all the same.)
#[cfg(unix)]
#[test]
fn a_read_only_folder_still_gives() {
    use std::os::unix::fs::PermissionsExt;
    let folder = Folder::new("read-only");
    let cache = folder.cache();
    cache.put(&key("a"), &cubin(1, 100));
    let mode = |mode| std::fs::set_permissions(&folder.0, PermissionsExt::from_mode(mode)).unwrap();
    mode(0o555);
    let writable = cache.usage().writable;
    cache.put(&key("b"), &cubin(2, 100));
    let (a, b, stats) = (cache.get(&key("a")), cache.get(&key("b")), cache.stats());
    // The mode is restored before the assertions, so that the folder can be removed in any case.
    mode(0o755);
    assert_eq!((a, b.is_some()), (Some(cubin(1, 100)), writable));
    assert_eq!((stats.stored, stats.unwritable), if writable { (2, 0) } else { (1, 1) });
}

/// A folder has the file's name, so the rename fails after the draft was written. The draft is removed.
#[test]
fn a_failed_rename_leaves_no_draft() {
    let folder = Folder::new("rename");
    let cache = folder.cache();
    cache.put(&key("a"), &cubin(9, 100));
    let path = folder.file();
    std::fs::remove_file(&path).unwrap();
    std::fs::create_dir_all(path.join("inside")).unwrap();
    cache.put(&key("a"), &cubin(9, 100));
    assert_eq!((cache.stats().unwritable, cache.get(&key("a"))), (1, None));
    assert_eq!(std::fs::read_dir(&folder.0).unwrap().count(), 1);
}

#[test]
fn the_oldest_go_when_there_is_too_much() {
    let folder = Folder::new("trim");
    let cache = CubinCache::new(Some(folder.0.clone()), 3500);
    for (i, name) in ["a", "b", "c"].into_iter().enumerate() {
        cache.put(&key(name), &cubin(i as u8, 1000));
        let used = SystemTime::now() - Duration::from_secs(100 - i as u64);
        let newest = file::list(&folder.0).into_iter().max_by_key(|f| f.used).unwrap();
        std::fs::File::options().write(true).open(newest.path).unwrap().set_modified(used).unwrap();
    }
    // "a" was used now, so "b" is the least recently used.
    assert!(cache.get(&key("a")).is_some());
    cache.put(&key("d"), &cubin(9, 1000));
    let there = ["a", "b", "c", "d"].map(|name| cache.get(&key(name)).is_some());
    assert_eq!(there, [true, false, true, true]);
    // A single kernel over the limit stays. Otherwise every start would compile it.
    cache.put(&key("e"), &cubin(9, 9000));
    assert!(cache.get(&key("e")).is_some());
    assert_eq!(cache.usage().entries, 1);
}

#[test]
fn drafts_of_dead_processes_go_and_young_ones_stay() {
    let folder = Folder::new("drafts");
    std::fs::create_dir_all(&folder.0).unwrap();
    for (name, age) in [(".1-0-0.draft", 7200), (".2-0-0.draft", 10)] {
        std::fs::write(folder.0.join(name), b"half").unwrap();
        let file = std::fs::File::options().write(true).open(folder.0.join(name)).unwrap();
        file.set_modified(SystemTime::now() - Duration::from_secs(age)).unwrap();
    }
    folder.cache().put(&key("a"), &cubin(1, 10));
    let there = [".1-0-0.draft", ".2-0-0.draft"].map(|name| folder.0.join(name).exists());
    assert_eq!(there, [false, true]);
}

/// Writes and reads in one folder repeatedly. Whatever is read must be complete. Each key has exactly one
/// content.
fn hammer(folder: &std::path::Path, rounds: usize) {
    // A small limit, so that files are removed all the time.
    let cache = CubinCache::new(Some(folder.to_path_buf()), 100_000);
    for round in 0..rounds {
        let n = (round % 7) as u8;
        let (key, cubin) = (key(&n.to_string()), cubin(n, 20_000 + usize::from(n)));
        if let Some(found) = cache.get(&key) {
            assert!(found == cubin, "a wrong cubin for key {n}");
        }
        cache.put(&key, &cubin);
    }
    let stats = cache.stats();
    assert_eq!((stats.damaged, stats.unwritable, stats.stored), (0, 0, rounds as u64), "{stats:?}");
}

const CHILD: &str = "FLASHCORE_TEST_CACHE_HAMMER";

/// The child of the next test, which starts several such processes. Does nothing otherwise.
#[test]
fn hammer_in_a_child() {
    if let Some(folder) = std::env::var_os(CHILD) {
        hammer(std::path::Path::new(&folder), 60);
    }
}

#[test]
fn threads_and_processes_share_a_folder() {
    let folder = Folder::new("shared");
    let program = std::env::current_exe().unwrap();
    let children: Vec<_> = (0..3)
        .map(|_| {
            let mut child = Command::new(&program);
            child.args(["--exact", "cache::tests::hammer_in_a_child"]).env(CHILD, &folder.0);
            child.stdout(std::process::Stdio::null()).spawn().unwrap()
        })
        .collect();
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| hammer(&folder.0, 60));
        }
    });
    for mut child in children {
        assert!(child.wait().unwrap().success());
    }
    let drafts = std::fs::read_dir(&folder.0).unwrap().flatten();
    assert_eq!(drafts.filter(|f| f.path().extension().is_some_and(|e| e == "draft")).count(), 0);
}

#[test]
fn the_environment_names_the_folder() {
    let folder = |set: &[(&str, &str)]| {
        let set: Vec<(String, PathBuf)> = set.iter().map(|(k, v)| (k.to_string(), v.into())).collect();
        folder_of(|name| set.iter().find(|(k, _)| k == name).map(|(_, v)| v.clone()))
    };
    let home = ("HOME", "/home/u");
    assert_eq!(folder(&[("FLASHCORE_CACHE_DIR", "/c"), home]), Some("/c".into()));
    assert_eq!(folder(&[("XDG_CACHE_HOME", "/x"), home]), Some("/x/flashcore".into()));
    // The XDG specification says to ignore relative paths.
    assert_eq!(folder(&[("XDG_CACHE_HOME", "x"), home]), Some("/home/u/.cache/flashcore".into()));
    assert_eq!(folder(&[]), None);
}
