//! The problem suites of races as data, shared by the command line and the Python package.

use kernels::Family;
use kernels::select::Shape;
use problem::{Band, DType, DTypes, Layout, Pass, Problem, ProblemError, Score};

/// A named list of problems.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Suite {
    /// The reference problem in both 16-bit element types, with and without mask.
    Mission,
    /// Variations of the reference problem whose grids do not fill a GPU.
    Small,
    /// 16k tokens of hidden size 2048, for which attention libraries publish their rates.
    Forward,
    /// The problems of `Forward`, computed with the `mma` family.
    Ampere,
    /// Sliding windows over 16k tokens, and models' soft caps of the scores.
    Windows,
    /// 8-bit inputs: 16k tokens of hidden size 2048, and 64 query heads over 8 KV heads of dim 128.
    Fp8,
}

impl Suite {
    pub const ALL: [Suite; 6] =
        [Suite::Mission, Suite::Small, Suite::Forward, Suite::Ampere, Suite::Windows, Suite::Fp8];

    /// The name in rows and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Suite::Mission => "mission",
            Suite::Small => "small",
            Suite::Forward => "forward",
            Suite::Ampere => "ampere",
            Suite::Windows => "windows",
            Suite::Fp8 => "fp8",
        }
    }

    /// The family that is raced; `None` for the family that the selection chooses.
    pub const fn family(self) -> Option<Family> {
        match self {
            Suite::Ampere => Some(Family::Mma),
            Suite::Mission | Suite::Small | Suite::Forward | Suite::Windows | Suite::Fp8 => None,
        }
    }

    pub fn named(name: &str) -> Option<Suite> {
        Suite::ALL.into_iter().find(|suite| suite.name() == name)
    }

    pub fn problems(self) -> Vec<Problem> {
        match self {
            Suite::Mission => {
                let dtypes = [DType::F16, DType::Bf16].into_iter();
                dtypes.flat_map(|dtype| masked(Problem::new(1, 8, 512, 64, dtype))).collect()
            }
            Suite::Small => {
                let mut problems = Vec::new();
                for dim in [64, 128] {
                    for (batch, heads) in [(1, 8), (1, 32), (4, 16)] {
                        for seq in [128, 256, 512, 1024] {
                            problems.extend(masked(Problem::new(batch, heads, seq, dim, DType::Bf16)));
                        }
                    }
                }
                problems
            }
            Suite::Forward | Suite::Ampere => {
                let mut problems = Vec::new();
                for dim in [64, 128, 256] {
                    for seq in [512, 1024, 2048, 4096, 8192, 16384] {
                        problems.extend(masked(Problem::new(
                            TOKENS / seq,
                            HIDDEN / dim,
                            seq,
                            dim,
                            DType::Bf16,
                        )));
                    }
                }
                problems
            }
            Suite::Windows => {
                let mut problems = Vec::new();
                for dim in [64, 128, 256] {
                    let full = Problem::new(1, HIDDEN / dim, TOKENS, dim, DType::Bf16);
                    problems.push(full.clone().with_band(Band::CAUSAL));
                    for keys in [128, 1024, 4096] {
                        problems.push(full.clone().with_band(Band::window(keys - 1, 0)));
                    }
                }
                for (dim, softcap) in [(128, 30.0), (256, 50.0)] {
                    let causal =
                        Problem::new(2, HIDDEN / dim, 8192, dim, DType::Bf16).with_band(Band::CAUSAL);
                    let score = Score { softcap: Some(softcap), ..Score::default() };
                    problems.push(Problem { score, ..causal });
                }
                problems
            }
            Suite::Fp8 => {
                let mut problems = Vec::new();
                for seq in [2048, 8192, 16384] {
                    for dim in [64, 128, 256] {
                        let problem = Problem::new(TOKENS / seq, HIDDEN / dim, seq, dim, DType::E4m3);
                        problems.extend(masked(problem));
                    }
                    // Publishers of 8-bit rates use these heads.
                    let grouped = Problem::new(TOKENS / seq, 64, seq, 128, DType::E4m3);
                    problems.extend(masked(grouped.with_heads_kv(8, Layout::Bhsd)));
                }
                problems
            }
        }
    }
}

/// The suite name of a problem that is in no suite.
pub const OTHER: &str = "other";

/// The name of the first suite that contains a problem, or [`OTHER`].
pub fn suite_of(problem: &Problem) -> &'static str {
    Suite::ALL.into_iter().find(|suite| suite.problems().contains(problem)).map_or(OTHER, Suite::name)
}

const TOKENS: usize = 16384;
const HIDDEN: usize = 2048;

fn masked(problem: Problem) -> [Problem; 2] {
    [Band::FULL, Band::CAUSAL].map(|mask| problem.clone().with_band(mask))
}

/// Number of calls per batch for a warm time. Short calls get many, because the timer and the launch take as
/// long.
pub fn calls(problem: &Problem) -> u32 {
    match problem.flops() {
        // Below about 50 µs on the fastest device.
        flops if flops < 2e10 => 20,
        flops if flops < 2e11 => 5,
        _ => 1,
    }
}

/// The format of a problem with the given words for the score and the outputs.
macro_rules! form {
    ($words:literal) => {
        concat!(
            "BATCH,HEADS,SEQ,DIM,DTYPE[,MASK]",
            $words,
            "[,bshd] as in 1,8,512,64,f16; HEADS may be QUERY/KEY heads as in 32/8, SEQ may be QUERIESxKEYS as in \
             1x8192, DIM may be of keys/of values as in 192/128, DTYPE is f16, bf16, f32, tf32, e4m3 or e5m2, MASK is \
             none, causal, causal-top-left, or a sliding window, window:BEFORE:AFTER or \
             window-top-left:BEFORE:AFTER, of BEFORE keys before the query's own and AFTER keys after it (inf for all)"
        )
    };
}

/// The format of a shape in words, which [`parse_shape`] reads.
pub const SHAPE_FORM: &str = form!("");

/// The format of a problem in words, which [`parse`] reads.
pub const FORM: &str = concat!(
    form!("[,backward][,softcap:CAP][,lse]"),
    "; backward, or backward:deterministic, asks for the gradients, and lse for the log-sum-exp"
);

const MASK: &str = "a mask, which is none, causal, causal-top-left, window:BEFORE:AFTER or \
     window-top-left:BEFORE:AFTER with keys from 0 on or inf,";
const SOFTCAP: &str = "softcap:CAP with a number above 0";
const BACKWARD: &str = "backward or backward:deterministic, without lse,";

/// Why a text does not describe a problem, with the accepted form.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum WordsError {
    #[error("{}", FORM)]
    Form,
    #[error("{}", SHAPE_FORM)]
    ShapeForm,
    /// A part of the text cannot be read.
    #[error("{expected} in place of '{part}'")]
    Part {
        part: String,
        /// The words that are accepted in its place.
        expected: &'static str,
    },
    /// A part stands at the wrong place, or twice.
    #[error(
        "nothing in place of '{0}': after DTYPE come MASK, backward, softcap:CAP, lse and bshd, in this order"
    )]
    Order(String),
    /// The form is right, but no such problem can be computed.
    #[error("a valid problem ({0})")]
    Problem(#[from] ProblemError),
    /// Searches and the ledger identify a problem by its shape, which has neither softcap nor LSE.
    #[error("a problem without softcap and lse")]
    NoShape,
}

/// Parses the shape of a problem in words.
///
/// # Errors
/// As [`parse`], and when the problem has a softcap or asks for the LSE, which shapes do not state.
pub fn parse_shape(text: &str) -> Result<Shape, WordsError> {
    let problem = parse(text).map_err(|error| match error {
        WordsError::Form => WordsError::ShapeForm,
        error => error,
    })?;
    if problem.score.softcap.is_some() || problem.pass.lse() {
        return Err(WordsError::NoShape);
    }
    Ok(Shape::of(&problem))
}

/// Parses a problem in words, such as `4,32/8,1x8192,128,bf16,causal`. Tensors are dense as
/// `[batch, head, sequence, dim]`, or with `bshd` as `[batch, sequence, head, dim]`.
///
/// # Errors
/// [`WordsError`] when the text is not a problem.
pub fn parse(text: &str) -> Result<Problem, WordsError> {
    let fields: Vec<&str> = text.split(',').map(str::trim).collect();
    let (shape, words) = fields.split_at_checked(5).ok_or(WordsError::Form)?;
    let mut rest = words;
    let mut take = |is: fn(&str) -> bool| {
        let (first, others) = rest.split_first().filter(|(word, _)| is(word))?;
        rest = others;
        Some(*first)
    };
    let mask = take(|word| {
        !word.starts_with("softcap:") && !word.starts_with("backward") && !matches!(word, "lse" | "bshd")
    });
    let pass = take(|word| word.starts_with("backward"));
    let softcap = take(|word| word.starts_with("softcap:"));
    let lse = take(|word| word == "lse").is_some();
    let layout = take(|word| word == "bshd").map_or(Layout::Bhsd, |_| Layout::Bshd);
    if let Some(surplus) = rest.first() {
        return Err(WordsError::Order(shortened(surplus)));
    }
    let part = |part: &str, expected| WordsError::Part { part: shortened(part), expected };
    let band = match mask {
        None => Band::FULL,
        Some(mask) => mask.parse().map_err(|_| part(mask, MASK))?,
    };
    // Without the caps that f32 rounds to 0 or infinity.
    let cap =
        |word: &str| word.split_once(':')?.1.parse().ok().filter(|cap: &f32| cap.is_normal() && *cap > 0.0);
    let softcap = match softcap {
        None => None,
        Some(word) => Some(cap(word).ok_or_else(|| part(word, SOFTCAP))?),
    };
    // One number for both extents, or two numbers.
    let pair = |text: &str, between: char| match text.split_once(between) {
        Some((a, b)) => Some((a.parse::<usize>().ok()?, b.parse::<usize>().ok()?)),
        None => text.parse().ok().map(|n| (n, n)),
    };
    let pair = |text: &str, between, expected| pair(text, between).ok_or_else(|| part(text, expected));
    let batch = shape[0].parse().map_err(|_| part(shape[0], "a whole number of batches"))?;
    let (heads_q, heads_kv) = pair(shape[1], '/', "heads as in 8 or 32/8")?;
    let (seq_q, seq_kv) = pair(shape[2], 'x', "a sequence as in 512 or 1x8192")?;
    let (dim, dim_v) = pair(shape[3], '/', "a head dimension as in 64 or 192/128")?;
    let dtypes: DTypes = shape[4].parse()?;
    let score = Score { softcap, ..Score::default() };
    let problem = Problem::new(batch, heads_q, seq_q, dim, dtypes);
    let problem = Problem { heads_kv, seq_kv, head_dim_v: dim_v, band, score, ..problem };
    let pass = match pass {
        None => Pass::forward(lse),
        Some("backward") if !lse => Pass::BACKWARD,
        Some("backward:deterministic") if !lse => Pass::DETERMINISTIC,
        Some(word) => return Err(part(word, BACKWARD)),
    };
    let problem = problem.with_pass(pass).with_layout(layout);
    problem.check()?;
    Ok(problem)
}

/// The beginning of a part, for a message.
fn shortened(part: &str) -> String {
    part.chars().take(40).collect()
}

/// Formats a dense problem in the words that [`parse`] reads.
pub fn words(problem: &Problem) -> String {
    let softcap = problem.score.softcap.map_or_else(String::new, |cap| format!(",softcap:{cap}"));
    let lse = if problem.pass.lse() { ",lse" } else { "" };
    let bshd = if is_bshd(problem) { ",bshd" } else { "" };
    format!("{}{softcap}{lse}{bshd}", Shape::of(problem))
}

/// Whether the tensors are dense as `[batch, sequence, head, dim]` and not also as
/// `[batch, head, sequence, dim]`.
pub fn is_bshd(problem: &Problem) -> bool {
    let is = |layout| problem.clone().with_layout(layout) == *problem;
    is(Layout::Bshd) && !is(Layout::Bhsd)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_what_is_parsed() {
        for text in [
            "1,8,512,64,f16",
            "4,32/8,1x8192,192/128,bf16,causal",
            "1,8,512x256,64,f16,causal-top-left",
            "1,8,512,64,bf16,window:127:0,softcap:50",
            "1,8,512,64,f16,causal,lse",
            "1,8,512,64,bf16,window-top-left:inf:3",
            "1,8,512,64,f16,softcap:50,lse,bshd",
            "1,8,512,64,f16,backward",
            "1,8,512,64,bf16,causal,backward:deterministic,softcap:50,bshd",
        ] {
            assert_eq!(words(&parse(text).unwrap()), text);
        }
    }

    #[test]
    fn problems_as_written() {
        assert_eq!(parse("1,8,512,64,f16").unwrap(), Problem::mission());
        let decode = parse("4, 32/8, 1x8192, 192/128, bf16, causal, bshd").unwrap();
        assert_eq!((decode.heads_q, decode.heads_kv, decode.seq_q, decode.seq_kv), (32, 8, 1, 8192));
        assert_eq!((decode.head_dim, decode.head_dim_v, decode.band), (192, 128, Band::CAUSAL));
        assert_eq!(decode.v, Layout::Bshd.strides(8, 8192, 128));
        assert_eq!(parse("1,8,512,64,f16,none").unwrap(), Problem::mission());
        for bad in ["", "1,8,512,64"] {
            assert_eq!(parse(bad), Err(WordsError::Form), "{bad}");
        }
        for (bad, said) in [
            ("1,8,512,64,f16,causl", "a mask, which is none, causal"),
            ("1,8,512,64,f16,full", "in place of 'full'"),
            ("1,8,512,64,f16,window:-1:0", "in place of 'window:-1:0'"),
            ("-1,8,512,64,f16", "a whole number of batches in place of '-1'"),
            ("1,8/,512,64,f16", "heads as in 8 or 32/8 in place of '8/'"),
            ("1,8,-1,64,f16", "a sequence as in 512 or 1x8192 in place of '-1'"),
            ("1,8,512,wide,f16", "a head dimension as in 64 or 192/128 in place of 'wide'"),
            ("1,8,512,64,f16,softcap:1e-60", "softcap:CAP with a number above 0 in place of 'softcap:1e-60'"),
            ("1,8,512,64,f16,bshd,causal-top-left", "nothing in place of 'causal-top-left'"),
            ("1,8,512,64,f16,lse,causal", "nothing in place of 'causal'"),
        ] {
            let error = parse(bad).unwrap_err().to_string();
            assert!(error.contains(said) && error.len() < 200, "{bad}: {error}");
        }
        for text in ["1,8,512,64,f16,softcap:30", "1,8,512,64,f16,lse"] {
            assert_eq!(parse_shape(text), Err(WordsError::NoShape));
        }
        assert_eq!(parse_shape("1,8"), Err(WordsError::ShapeForm));
        assert_eq!(parse_shape("1,8,512,64,f16"), Ok(Shape::of(&Problem::mission())));
        for (bad, why) in [
            ("1,8,512,64,f8", "f8"),
            ("1,8/3,512,64,f16", "heads_kv = 3"),
            ("0,8,512,64,f16", "for batch: expected 1"),
        ] {
            let error = parse(bad).unwrap_err();
            assert!(matches!(error, WordsError::Problem(_)) && error.to_string().contains(why), "{error}");
        }
    }

    #[test]
    fn suites_hold_what_they_say() {
        let count = |suite: Suite| suite.problems().len();
        assert_eq!(Suite::ALL.map(count), [4, 48, 36, 36, 14, 24]);
        for problem in Suite::ALL.into_iter().flat_map(Suite::problems) {
            problem.check().unwrap();
        }
        assert!(
            Suite::Forward
                .problems()
                .iter()
                .all(|p| p.batch * p.seq_q == TOKENS && p.heads_q * p.head_dim == HIDDEN)
        );
        assert!(Suite::Mission.problems().contains(&Problem::mission()));
        assert_eq!(Suite::named("small"), Some(Suite::Small));
        let long = Problem::new(1, 1, 131_072, 128, DType::Bf16);
        assert_eq!((suite_of(&Problem::mission()), suite_of(&long)), ("mission", OTHER));
        assert_eq!(
            (calls(&Problem::mission()), calls(&Problem::new(1, 32, 16384, 64, DType::Bf16))),
            (20, 1)
        );
    }
}
