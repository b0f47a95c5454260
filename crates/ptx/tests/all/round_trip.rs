//! `parse(print(m)) == m` for generated modules. Damaged text causes no panic.

use std::path::Path;

use flashcore_ptx::parse;
use proptest::prelude::*;

use crate::generate::{Choices, module};

/// Texts from the corpus that are short enough to be damaged many times per second.
fn corpus() -> Vec<String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../filetests");
    let mut texts = Vec::new();
    for folder in ["corpus", "parse", "verify", "emit"].map(|purpose| folder.join(purpose)) {
        for path in std::fs::read_dir(folder).unwrap().filter_map(|entry| Some(entry.ok()?.path())) {
            if path.extension().is_some_and(|extension| extension == "ptx") {
                texts.push(std::fs::read_to_string(path).unwrap());
            }
        }
    }
    texts.retain(|text| text.len() < 12_000);
    texts.sort();
    assert!(texts.len() > 10);
    texts
}

/// A text that parses must either fail or pass verification without a panic, and its printed form must parse
/// to an equal module.
fn survives(text: &str) {
    if let Ok(module) = parse(text) {
        let _ = module.check();
        let printed = module.to_string();
        let again = parse(&printed).unwrap_or_else(|e| panic!("printed text: {e}\n{printed}"));
        assert_eq!(again, module, "{printed}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn generated_modules_read_back(choices in prop::collection::vec(any::<u32>(), 40..400)) {
        let module = module(&mut Choices::new(choices));
        let printed = module.to_string();
        let again = parse(&printed).map_err(|e| TestCaseError::fail(format!("{e}\n{printed}")))?;
        prop_assert_eq!(again, module, "{}", printed);
    }

    #[test]
    fn damaged_text_does_no_harm(
        which in any::<prop::sample::Index>(),
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>(), 0u8..5), 1..6),
    ) {
        let texts = corpus();
        let mut text = texts[which.index(texts.len())].clone().into_bytes();
        for (at, other, kind) in edits {
            let (i, j) = (at.index(text.len()), other.index(text.len()));
            match kind {
                0 => { text.remove(i); }
                1 => text.insert(i, b"{}[]<>();:,.%@!|+-0 \"/\n"[j % 23]),
                2 => text.swap(i, j),
                3 => text.truncate(i.max(1)),
                // A piece of the text copied to another place.
                _ => {
                    let piece = text[i..(i + 40).min(text.len())].to_vec();
                    text.splice(j..j, piece);
                }
            }
            if text.is_empty() { return Ok(()); }
        }
        survives(&String::from_utf8_lossy(&text));
    }

    #[test]
    fn any_text_does_no_harm(text in "(\\PC|\n){0,200}") {
        survives(&text);
        survives(&format!(".version 8.0 .target sm_80 .entry k() {{ {text} }}"));
    }
}

/// Cases found by fuzzing.
#[test]
fn the_ends_of_the_number_line_read_back() {
    for operand in ["tile+-9223372036854775808", "tile-9223372036854775808", "tile+9223372036854775807"] {
        let text = format!(
            ".version 7.0\n.target sm_80\n.address_size 64\n.visible .entry k()\n{{\n.reg .b64 %rd<2>;\n\
             .shared .align 4 .b8 tile[32];\nmov.u64 %rd1, {operand};\nld.shared.b64 %rd1, [{operand}];\nret;\n}}\n"
        );
        assert!(parse(&text).is_ok(), "{operand}");
        survives(&text);
    }
}

/// Coordinates that are missing, that do not follow their map, or that follow an operand that is not a map.
#[test]
fn boxes_without_coordinates_read_back() {
    let load = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes";
    for operands in [
        "[%rd1], [%rd1], [%rd1]",
        "[%rd1], [%rd1], {%rd1, %rd1}, [%rd1]",
        "[%rd1, {%rd1, 0}], [%rd1]",
        "[%rd1], [%rd1], %rd1",
    ] {
        let text = format!(
            ".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry k()\n{{\n.reg .b64 %rd<2>;\n\
             {load} {operands};\nst.b64 [%rd1, {{%rd1}}], %rd1;\nret;\n}}\n"
        );
        assert!(parse(&text).is_ok(), "{operands}");
        survives(&text);
    }
}

/// Texts that are made to take much time or memory.
#[test]
fn hostile_texts_are_refused_at_once() {
    let header = ".version 8.0\n.target sm_80\n.address_size 64\n";
    let many = |text: &str| text.repeat(100_000);
    let texts = [
        format!("{header}.entry k() {{{}", many("{")),
        format!("{header}.entry k() {{ mov.u32 %laneid, {}1;", many("(")),
        format!("{header}.entry k() {{ mov.u32 %laneid, {}1;", many("-")),
        format!("{header}.entry k() {{ mov.b32 {}", many("{")),
        format!("{header}.entry k() {{{}", many(".reg .b32 %r<4000000000>;")),
        format!("{header}.global .u8 x{} = {}", many("[2]"), many("{")),
        format!(
            "{header}{}",
            (0..200).map(|i| format!(".global .u8 x{i}[1][16777000] = {{{{}}}};\n")).collect::<String>()
        ),
        format!(
            "{header}.entry k() {{ t: .branchtargets L{};{} L: }}",
            many(", L"),
            many("brx.idx %laneid, t;")
        ),
        format!("{header}.entry k() {{ add{} 1; }}", many(".u32")),
        format!("{header}/*{}", many("*")),
        many("."),
    ];
    let start = std::time::Instant::now();
    for text in texts {
        let error = parse(&text).expect_err("refused");
        assert!(error.text.chars().count() <= 200 && error.line > 0, "{error}");
    }
    assert!(start.elapsed().as_secs() < 10, "took {:?}", start.elapsed());
}

/// 10 000 lines take tens of milliseconds in a release build. The bound leaves room for slow machines and
/// debug builds.
#[test]
fn ten_thousand_lines_parse_fast() {
    let text = filetest::corpus("triton_flash_sm80").unwrap();
    let (header, function) = text.split_once(".visible .entry kernel").unwrap();
    let repeated: String = (0..11).map(|i| format!(".visible .entry kernel{i}{function}\n")).collect();
    let text = format!("{header}{repeated}");
    let start = std::time::Instant::now();
    let module = parse(&text).unwrap();
    let parsed = start.elapsed();
    module.verify().unwrap();
    let verified = start.elapsed() - parsed;
    eprintln!("{} lines: parsed in {parsed:?}, verified in {verified:?}", text.lines().count());
    assert!(
        parsed.as_millis() < 1000 && verified.as_millis() < 1000,
        "parsed {parsed:?}, verified {verified:?}"
    );
}
