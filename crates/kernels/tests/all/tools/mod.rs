//! ptxas and nvdisasm, if `cargo xtask test` or the environment provides them.
//!
//! One version of ptxas always generates the same machine code and messages for the same text. Both are kept
//! in cargo's folder for temporary files of tests, so that a text is assembled once, for all tests and runs.
//! The output of nvdisasm is kept there too.

mod facts;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, SystemTime};

use ptx::Kernel;
use sha2::{Digest, Sha256};

pub use facts::{Facts, facts};

/// The result of assembling a kernel.
pub struct Assembled {
    pub registers: u32,
    /// Bytes of spill stores and loads.
    pub spills: u32,
    cubin: PathBuf,
}

impl Assembled {
    /// The machine code in the cubin: the executable sections of an ELF file, one for each entry.
    pub fn code(&self) -> Vec<u8> {
        let file = fs::read(&self.cubin).unwrap();
        let number = |at: usize, bytes: usize| {
            file[at..at + bytes].iter().rev().fold(0, |number, &byte| number << 8 | usize::from(byte))
        };
        // Fields of the ELF header and of section headers (Elf64_Ehdr, Elf64_Shdr).
        let (headers, size, count) = (number(0x28, 8), number(0x3A, 2), number(0x3C, 2));
        let sections = (0..count).map(|section| headers + section * size);
        let executable = sections.filter(|section| number(section + 8, 8) & 4 != 0);
        let code: Vec<u8> = executable
            .flat_map(|section| {
                let (start, bytes) = (number(section + 0x18, 8), number(section + 0x20, 8));
                file[start..start + bytes].to_vec()
            })
            .collect();
        assert!(!code.is_empty(), "no executable section");
        code
    }
}

/// A temporary file, deleted on drop.
struct Scratch(PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        // A file that stays in the temporary folder does no harm.
        let _ = fs::remove_file(&self.0);
    }
}

fn scratch(suffix: &str) -> Scratch {
    Scratch(std::env::temp_dir().join(unique(suffix)))
}

/// A file name that no other test has.
fn unique(suffix: &str) -> String {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    format!("flashcore-{}-{}.{suffix}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed))
}

/// The path of the tool that an environment variable names.
pub fn find(variable: &str) -> Option<PathBuf> {
    let path = std::env::var_os(variable).map(PathBuf::from);
    if path.is_none() {
        filetest::not_run(format_args!("{variable} is not set"));
    }
    path
}

/// The first sixteen hex digits of SHA-256.
pub fn hash(bytes: &[u8]) -> String {
    let digest = Sha256::digest(bytes);
    digest.iter().take(8).fold(String::new(), |text, byte| text + &format!("{byte:02x}"))
}

/// The line with which ptxas or nvdisasm names its version.
pub fn version(tool: &Path) -> String {
    static VERSIONS: Mutex<BTreeMap<PathBuf, String>> = Mutex::new(BTreeMap::new());
    let mut versions = VERSIONS.lock().unwrap();
    let ask = || {
        let output = Command::new(tool).arg("--version").output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        text.lines().last().expect("a tool names its version").trim().to_owned()
    };
    versions.entry(tool.to_owned()).or_insert_with(ask).clone()
}

/// The folder of the results of one version of ptxas, without those that no test has used for a month.
fn results(ptxas: &Path) -> &'static Path {
    const UNUSED: Duration = Duration::from_secs(30 * 24 * 3600);
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let version = hash(version(ptxas).as_bytes());
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("ptxas").join(version);
        fs::create_dir_all(&folder).unwrap();
        for result in fs::read_dir(&folder).unwrap().flatten() {
            let used = result.metadata().and_then(|of| of.modified());
            if used.is_ok_and(|used| used.elapsed().is_ok_and(|age| age > UNUSED)) {
                // Another run of the tests may have deleted it.
                let _ = fs::remove_dir_all(result.path());
            }
        }
        folder
    })
}

/// The files of a result: the messages of ptxas and the machine code.
const LOG: &str = "log";
const CUBIN: &str = "cubin";

/// Assembles a kernel for its target.
pub fn assemble(ptxas: &Path, kernel: &Kernel) -> Assembled {
    let text = kernel.module.to_string();
    let result = results(ptxas).join(hash(text.as_bytes()));
    if !result.exists() {
        // The folder gets its name when it is complete, since a run may be interrupted.
        let made = results(ptxas).join(unique("new"));
        fs::create_dir(&made).unwrap();
        let source = scratch("ptx");
        fs::write(&source.0, &text).unwrap();
        let arch = format!("-arch={}", kernel.module.target);
        let mut command = Command::new(ptxas);
        command.args(["-v", &arch]).arg(&source.0).arg("-o").arg(made.join(CUBIN));
        let output = command.output().unwrap();
        let log = [output.stderr, output.stdout].concat();
        assert!(output.status.success(), "ptxas refuses the kernel:\n{}", String::from_utf8_lossy(&log));
        fs::write(made.join(LOG), log).unwrap();
        // Another test may have assembled the text meanwhile.
        if fs::rename(&made, &result).is_err() {
            fs::remove_dir_all(&made).unwrap();
        }
    }
    // Marks the result as used.
    File::open(&result).unwrap().set_modified(SystemTime::now()).unwrap();
    let log = fs::read_to_string(result.join(LOG)).unwrap();
    // C7508: setmaxnreg is ignored. C7510 to C7512: `wgmma` products are serialised.
    assert!(!log.contains("C75"), "{log}");
    Assembled {
        registers: number_before(&log, " registers").unwrap_or_else(|| panic!("no registers in {log}")),
        spills: [" bytes spill stores", " bytes spill loads"]
            .map(|what| numbers_before(&log, what))
            .into_iter()
            .sum(),
        cubin: result.join(CUBIN),
    }
}

/// A kernel's machine code as text, which is kept beside the machine code.
pub fn disassemble(nvdisasm: &Path, kernel: &Assembled) -> String {
    let kept = kernel.cubin.with_extension(hash(version(nvdisasm).as_bytes()));
    if let Ok(text) = fs::read_to_string(&kept) {
        return text;
    }
    let output = Command::new(nvdisasm).arg("-c").arg(&kernel.cubin).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let made = kernel.cubin.with_file_name(unique("sass"));
    fs::write(&made, &output.stdout).unwrap();
    fs::rename(&made, &kept).unwrap();
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// The instructions of many kernels, from one call: the disassembler takes longer to start than to read all
/// kernels.
pub fn disassemble_all(nvdisasm: &Path, codes: &[Vec<u8>]) -> Vec<Vec<String>> {
    /// Bytes of an instruction.
    const INSTRUCTION: usize = 16;
    let file = scratch("bin");
    fs::write(&file.0, codes.concat()).unwrap();
    let output = Command::new(nvdisasm).args(["-ndf", "-b", "SM90a"]).arg(&file.0).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8_lossy(&output.stdout);
    let mut instructions = text.lines().filter(|line| line.trim_start().starts_with("/*"));
    let of = |code: &Vec<u8>| {
        let own: Vec<_> = instructions.by_ref().take(code.len() / INSTRUCTION).map(str::to_owned).collect();
        assert_eq!(own.len() * INSTRUCTION, code.len(), "an instruction is a line");
        own
    };
    codes.iter().map(of).collect()
}

/// The sum of the numbers before `what` in the log, one for each entry.
fn numbers_before(log: &str, what: &str) -> u32 {
    let ends: Vec<usize> = log.match_indices(what).map(|(end, _)| end + what.len()).collect();
    assert!(!ends.is_empty(), "no{what} in {log}");
    let starts = std::iter::once(0).chain(ends.iter().copied());
    starts.zip(&ends).filter_map(|(start, &end)| number_before(&log[start..end], what)).sum()
}

/// The number before `what` in the log.
fn number_before(log: &str, what: &str) -> Option<u32> {
    let before = &log[..log.find(what)?];
    before.rsplit(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}
