//! Mutations of texts: bytes, tokens and lines, like careless and malicious edits.

use rand::Rng;
use rand::rngs::SmallRng;
use rand::seq::IndexedRandom;

/// Numbers at the limits of types and checks.
const NUMBERS: [&str; 44] = [
    "0",
    "1",
    "2",
    "3",
    "4",
    "5",
    "7",
    "8",
    "15",
    "16",
    "17",
    "31",
    "32",
    "33",
    "63",
    "64",
    "65",
    "127",
    "128",
    "255",
    "256",
    "257",
    "1000",
    "1023",
    "1024",
    "1025",
    "4096",
    "65535",
    "65536",
    "100000",
    "1000000",
    "2147483647",
    "2147483648",
    "4294967295",
    "4294967296",
    "9223372036854775807",
    "9223372036854775808",
    "18446744073709551615",
    "-1",
    "-2147483648",
    "-9223372036854775808",
    "0xFFFFFFFF",
    "0f7FC00000",
    "0dFFF0000000000000",
];

/// Lines that request large resources, do not end, or are out of place.
const SNIPPETS: [&str; 24] = [
    ".reg .b32 %huge<1000000>;",
    ".reg .b64 %many<70000>;",
    ".reg .pred %flags<5000>;",
    ".shared .align 1024 .b8 hoard[90000];",
    ".local .align 8 .b8 heap[1000000000];",
    ".local .align 16 .b8 stack[70000];",
    "SELF: bra SELF;",
    "exit;",
    "ret;",
    "trap;",
    "bar.sync 0;",
    "bar.sync 15, 64;",
    "bar.arrive 3, 32;",
    "barrier.sync 1;",
    "bar.warp.sync 0xffffffff;",
    "cp.async.wait_group 0;",
    "cp.async.commit_group;",
    "membar.gl;",
    "}",
    "{",
    ".maxntid 1, 1, 1",
    ".reqntid 4294967295, 4294967295, 4294967295",
    ".pragma \"nounroll\";",
    ".version 9.0",
];

/// The kind of a token, so that it can be replaced by one of its kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Register,
    Modifier,
    Number,
    Name,
    Other,
}

fn kind(token: &str) -> Kind {
    match token.as_bytes()[0] {
        b'%' => Kind::Register,
        b'.' if token.len() > 1 => Kind::Modifier,
        b'0'..=b'9' => Kind::Number,
        b'A'..=b'Z' | b'a'..=b'z' | b'_' | b'$' => Kind::Name,
        _ => Kind::Other,
    }
}

/// Splits a text into words (a point or a percent sign begins one) and other single characters. Joined, they
/// give the text.
fn tokens(text: &str) -> Vec<&str> {
    let word = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '$';
    let mut found = Vec::new();
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let begins = word(first) || first == '.' || first == '%';
        let tail = if begins {
            rest[1..].find(|c| !word(c)).map_or(rest.len(), |at| at + 1)
        } else {
            first.len_utf8()
        };
        let (token, after) = rest.split_at(tail);
        found.push(token);
        rest = after;
    }
    found
}

/// Applies one to six edits to `text`. Lines and words may come from `donor`.
pub fn mutate(rng: &mut SmallRng, text: &str, donor: &str) -> String {
    let mut text = text.to_owned();
    // Few edits are most useful: a text with many is rejected at the first of them.
    let edits = *[1, 1, 1, 2, 2, 3, 6].choose(rng).unwrap_or(&1);
    for _ in 0..edits {
        text = match rng.random_range(0..16) {
            0 => bytes(rng, &text),
            1..=6 => lines(rng, &text, donor),
            _ => words(rng, &text, donor),
        };
    }
    text
}

fn bytes(rng: &mut SmallRng, text: &str) -> String {
    let mut bytes = text.as_bytes().to_vec();
    damage(rng, &mut bytes);
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Applies one edit to bytes that need not be a text.
pub fn damage(rng: &mut SmallRng, bytes: &mut Vec<u8>) {
    if bytes.is_empty() {
        return bytes.push(rng.random());
    }
    let (i, j) = (rng.random_range(0..bytes.len()), rng.random_range(0..bytes.len()));
    match rng.random_range(0..6) {
        0 => drop(bytes.remove(i)),
        1 => bytes.insert(i, b"{}[]<>();:,.%@!|+-0 \"/\n\\"[j % 24]),
        2 => bytes.swap(i, j),
        3 => bytes[i] = rng.random(),
        4 => bytes.truncate(i.max(1)),
        _ => {
            let piece = bytes[i..(i + 40).min(bytes.len())].to_vec();
            bytes.splice(j..j, piece);
        }
    }
}

fn lines(rng: &mut SmallRng, text: &str, donor: &str) -> String {
    let mut lines: Vec<&str> = text.lines().collect();
    if lines.is_empty() {
        return donor.to_owned();
    }
    let (i, j) = (rng.random_range(0..lines.len()), rng.random_range(0..lines.len()));
    match rng.random_range(0..7) {
        0 => drop(lines.remove(i)),
        1 => drop(lines.drain(i..(i + rng.random_range(2..9)).min(lines.len()))),
        2 => lines.insert(j, lines[i]),
        3 => lines.swap(i, j),
        4 => {
            let line = lines.remove(i);
            lines.insert(j.min(lines.len()), line);
        }
        5 => lines.insert(j, SNIPPETS[rng.random_range(0..SNIPPETS.len())]),
        _ => {
            let theirs: Vec<&str> = donor.lines().collect();
            let line = theirs.choose(rng).copied().unwrap_or("");
            lines.insert(j, line);
        }
    }
    lines.join("\n") + "\n"
}

fn words(rng: &mut SmallRng, text: &str, donor: &str) -> String {
    let mut words = tokens(text);
    let telling: Vec<usize> = (0..words.len()).filter(|&i| kind(words[i]) != Kind::Other).collect();
    let Some(&at) = telling.choose(rng) else { return bytes(rng, text) };
    let class = kind(words[at]);
    let alike: Vec<usize> = telling.into_iter().filter(|&i| kind(words[i]) == class).collect();
    let other = *alike.choose(rng).unwrap_or(&at);
    let theirs: Vec<&str> = tokens(donor).into_iter().filter(|t| kind(t) == class).collect();
    match (rng.random_range(0..8), class) {
        (0, _) => drop(words.remove(at)),
        (1, _) => words.swap(at, other),
        (2, _) => words.insert(at, words[other]),
        (3..=5, Kind::Number) => words[at] = NUMBERS[rng.random_range(0..NUMBERS.len())],
        (3 | 4, _) => words[at] = theirs.choose(rng).copied().unwrap_or(words[other]),
        _ => words[at] = words[other],
    }
    words.concat()
}

/// Replaces one number of the text, if it has any.
pub fn renumber(rng: &mut SmallRng, text: &str) -> String {
    let mut words = tokens(text);
    let numbers: Vec<usize> = (0..words.len()).filter(|&i| kind(words[i]) == Kind::Number).collect();
    if let Some(&at) = numbers.choose(rng) {
        words[at] = NUMBERS[rng.random_range(0..NUMBERS.len())];
    }
    words.concat()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;

    #[test]
    fn tokens_join_to_their_text() {
        let text = "@%p1 ld.global.v4.f32 {%f1, %f2}, [%rd1+-16]; // é\n$L__BB0_1:\n";
        assert_eq!(tokens(text).concat(), text);
        assert_eq!(tokens("ld.global.u32 %r1"), ["ld", ".global", ".u32", " ", "%r1"]);
    }

    #[test]
    fn mutations_differ_and_repeat_by_seed() {
        let text = "mov.u32 %r1, 5;\nadd.u32 %r2, %r1, 7;\nret;\n";
        let all = |seed| {
            let mut rng = SmallRng::seed_from_u64(seed);
            (0..200).map(|_| mutate(&mut rng, text, "bar.sync 0;\n")).collect::<Vec<_>>()
        };
        assert_eq!(all(1), all(1));
        let mut distinct = all(1);
        distinct.sort();
        distinct.dedup();
        assert!(distinct.len() > 100, "{}", distinct.len());
    }
}
