//! The reports of ptxas and nvdisasm on kernels, kept in `filetests/ptxas.txt`.
//!
//! Each line of that file describes a kernel: the hashes of its PTX text and of its machine code, registers,
//! bytes of spills, and counts of instructions if the kernel has `wgmma` products. One version of ptxas
//! always generates the same machine code for the same text. A text that the file has is therefore not
//! assembled again, except for one in [`SAMPLED`], whose line must be right. `BLESS_MACHINE_CODE=1 cargo test
//! -p flashcore-kernels --test all`, without a filter, assembles all texts and writes the file.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::path::Path;
use std::sync::{Mutex, OnceLock};

use ptx::Kernel;

use super::{assemble, disassemble_all, find, hash, version};
use crate::common::each::each;

/// Of the texts that the file has, one in about this many is assembled anyway.
const SAMPLED: u8 = 16;
/// First word of the line that names the version of ptxas.
const VERSION: &str = "ptxas";
/// The instructions that are counted.
const COUNTED: [&str; 4] = ["HGMMA", "QGMMA", "WARPGROUP.DEPBAR", "UTMALDG"];

/// The report of ptxas and nvdisasm on a kernel. [`assemble`] fails if ptxas serialises products.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    /// The hash of the machine code.
    pub code: String,
    pub registers: u32,
    /// Bytes of spill stores and loads.
    pub spills: u32,
    /// Counts of the instructions in `COUNTED`.
    counts: Option<[usize; COUNTED.len()]>,
}

impl Facts {
    /// How many instructions of a kind there are. `None` if the kernel has no `wgmma` products, or there is
    /// no nvdisasm.
    pub fn count(&self, instruction: &str) -> Option<usize> {
        let kind = COUNTED.iter().position(|counted| *counted == instruction).expect("a counted instruction");
        self.counts.map(|counts| counts[kind])
    }
}

/// Facts by the hash of the text.
type Known = BTreeMap<String, Facts>;

/// Parses the file: the version of ptxas, and the facts.
fn read(file: &str) -> (&str, Known) {
    let (mut version, mut known) = ("", Known::new());
    for line in file.lines().filter(|line| !line.starts_with('#')) {
        if let Some(name) = line.strip_prefix(VERSION) {
            version = name.trim();
            continue;
        }
        let words: Vec<&str> = line.split(' ').collect();
        let [text, code, numbers @ ..] = &words[..] else { panic!("not a line of facts: {line}") };
        let numbers: Vec<usize> = numbers.iter().map(|number| number.parse().expect("a number")).collect();
        let [registers, spills, counts @ ..] = &numbers[..] else { panic!("not a line of facts: {line}") };
        let counts = (!counts.is_empty()).then(|| counts.try_into().expect("as many counts as instructions"));
        let (registers, spills) = (*registers as u32, *spills as u32);
        let facts = Facts { code: (*code).to_owned(), registers, spills, counts };
        assert!(known.insert((*text).to_owned(), facts).is_none(), "{text} stands twice");
    }
    (version, known)
}

/// The text of the file.
fn file(version: &str, known: &Known) -> String {
    let mut file = format!(
        "# PTX text, machine code, registers, spills, {}: see crates/kernels/tests/all/tools/facts.rs\n",
        COUNTED.join(", ")
    );
    writeln!(file, "{VERSION} {version}").unwrap();
    for (text, Facts { code, registers, spills, counts }) in known {
        write!(file, "{text} {code} {registers} {spills}").unwrap();
        counts.iter().flatten().for_each(|count| write!(file, " {count}").unwrap());
        file.push('\n');
    }
    file
}

const PATH: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../filetests/ptxas.txt");

/// The committed facts, if they are of this ptxas.
fn committed(ptxas: &Path) -> &'static Known {
    static COMMITTED: OnceLock<Known> = OnceLock::new();
    COMMITTED.get_or_init(|| {
        let text = fs::read_to_string(PATH).expect("the committed file");
        let (of, known) = read(&text);
        if of == version(ptxas) { known } else { Known::new() }
    })
}

/// Writes the file with the facts that this run has found so far.
fn bless(ptxas: &Path, found: Known) {
    static FOUND: Mutex<Known> = Mutex::new(Known::new());
    let mut all = FOUND.lock().unwrap();
    all.extend(found);
    fs::write(PATH, file(&version(ptxas), &all)).unwrap();
}

/// The facts of kernels, in order; `None` without ptxas.
pub fn facts(kernels: &[&Kernel]) -> Option<Vec<Facts>> {
    let ptxas = find("FLASHCORE_PTXAS")?;
    let blesses = std::env::var_os("BLESS_MACHINE_CODE").is_some();
    let none = Known::new();
    let known = if blesses { &none } else { committed(&ptxas) };
    let texts = each(kernels, |kernel| hash(kernel.module.to_string().as_bytes()));
    let sampled = |text: &str| u8::from_str_radix(&text[..2], 16).is_ok_and(|first| first % SAMPLED == 0);
    let by_text: BTreeMap<&str, &Kernel> =
        texts.iter().map(String::as_str).zip(kernels.iter().copied()).collect();
    let open = by_text.into_iter().filter(|(text, _)| sampled(text) || !known.contains_key(*text));
    let found = assembled(&ptxas, &open.collect::<Vec<_>>());
    for (text, facts) in &found {
        if let Some(of_file) = known.get(text) {
            // Without nvdisasm nothing is counted.
            let counts = of_file.counts.filter(|_| facts.counts.is_some());
            assert_eq!(*facts, Facts { counts, ..of_file.clone() }, "{PATH} is wrong about {text}");
        }
    }
    if blesses {
        bless(&ptxas, found.clone());
    }
    let facts = |text: &String| found.get(text).or_else(|| known.get(text)).expect("known or found").clone();
    Some(texts.iter().map(facts).collect())
}

/// Assembles kernels, given with the hashes of their texts, and counts their instructions.
fn assembled(ptxas: &Path, kernels: &[(&str, &Kernel)]) -> Known {
    let assembled = each(kernels, |(_, kernel)| {
        let assembled = assemble(ptxas, kernel);
        let has_products = kernel.module.to_string().contains("wgmma.mma_async");
        (assembled.code(), assembled, has_products)
    });
    let codes = assembled.iter().filter(|(.., has_products)| *has_products).map(|(code, ..)| code.clone());
    let codes: Vec<Vec<u8>> = codes.collect();
    let nvdisasm = find("FLASHCORE_NVDISASM").filter(|_| !codes.is_empty());
    let lines = nvdisasm.map_or_else(Vec::new, |nvdisasm| disassemble_all(&nvdisasm, &codes));
    let mut lines = lines.iter();
    let facts = assembled.iter().zip(kernels).map(|((code, assembled, has_products), (text, _))| {
        let lines = has_products.then(|| lines.next()).flatten();
        let counts = lines.map(|lines| {
            COUNTED.map(|instruction| lines.iter().filter(|line| line.contains(instruction)).count())
        });
        let (code, registers, spills) = (hash(code), assembled.registers, assembled.spills);
        ((*text).to_owned(), Facts { code, registers, spills, counts })
    });
    facts.collect()
}

#[test]
fn what_is_written_is_read() {
    let facts = |counts| Facts { code: "c2".to_owned(), registers: 128, spills: 8, counts };
    let known: Known = [("a0".to_owned(), facts(None)), ("b1".to_owned(), facts(Some([1, 0, 2, 3])))].into();
    assert_eq!(read(&file("version 1", &known)), ("version 1", known));
}
