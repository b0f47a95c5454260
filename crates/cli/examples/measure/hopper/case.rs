//! A test case: a problem with a plan for it.

use std::fmt;

use bench::{Suite, suites};
use check::genes::with_genes;
use kernels::{Arch, Family, Plan};
use problem::{Layout, Problem};
use serde_json::{Value, json};

use super::Error;

/// A problem with the genes of its plan.
#[derive(Clone, Debug)]
pub struct Case {
    pub problem: Problem,
    genes: Value,
}

/// The genes of a plan. `word` is the name of a family, a JSON object, or the path of a file with a JSON
/// object; otherwise the result is `None`.
pub fn genes(word: &str) -> Result<Option<Value>, Error> {
    if let Some(family) = Family::named(word) {
        return Ok(Some(json!({ "family": family.name() })));
    }
    let text = match word {
        word if word.starts_with('{') => word.to_owned(),
        word if word.ends_with(".json") => std::fs::read_to_string(word)?,
        _ => return Ok(None),
    };
    let genes: Value = serde_json::from_str(&text)?;
    match genes["family"].as_str().and_then(Family::named) {
        Some(_) => Ok(Some(genes)),
        None => {
            let accepted = Family::ALL.map(Family::name).join(", ");
            Err(format!("invalid value in {word} for family: expected {accepted}").into())
        }
    }
}

/// The problems that `word` names: those of a suite (`@small`), or a single problem, perhaps with keys in
/// pages (`64,32/8,1x4096,128,bf16,pages=16`).
pub fn problems(word: &str) -> Result<Vec<Problem>, Error> {
    match word.strip_prefix('@') {
        Some(name) => {
            let accepted = || Suite::ALL.map(|suite| format!("@{}", suite.name())).join(", ");
            let suite = Suite::named(name)
                .ok_or_else(|| format!("invalid value '{word}' for the suite: expected {}", accepted()))?;
            Ok(suite.problems())
        }
        None => {
            let (dense, page) =
                word.split_once(",pages=").map_or((word, None), |(dense, page)| (dense, Some(page)));
            let problem = suites::parse(dense)
                .map_err(|accepted| format!("invalid value '{word}' for the problem: expected {accepted}"))?;
            let Some(page) = page.map(str::parse::<usize>).transpose()? else { return Ok(vec![problem]) };
            let pages = problem.batch * problem.seq_kv.div_ceil(page.max(1));
            Ok(vec![problem.with_pages(page, pages)])
        }
    }
}

impl Case {
    pub fn new(problem: Problem, genes: &Value) -> Case {
        Case { problem, genes: genes.clone() }
    }

    /// The family's default with the given genes.
    pub fn plan(&self, arch: &Arch) -> Result<Plan, Error> {
        let family = self.genes["family"].as_str().and_then(Family::named).ok_or("no family")?;
        // A default that does not fit may fit with other genes.
        let plan = with_genes(&family.proposal(&self.problem, arch), &self.genes)?;
        plan.check(&self.problem, arch)?;
        Ok(plan)
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let p = &self.problem;
        let pair = |a: usize, b: usize, between: &str| {
            if a == b { a.to_string() } else { format!("{a}{between}{b}") }
        };
        let (heads, seq) = (pair(p.heads_q, p.heads_kv, "/"), pair(p.seq_q, p.seq_kv, "x"));
        let dim = pair(p.head_dim, p.head_dim_v, "/");
        write!(f, "B{} H{heads} S{seq} D{dim} {} {}", p.batch, p.dtypes, p.band)?;
        match p.storage.pages() {
            Some(pages) => write!(f, " pages of {}", pages.rows)?,
            None if *p != p.clone().with_layout(Layout::Bhsd) => f.write_str(" bshd")?,
            None => {}
        }
        let family = self.genes["family"].as_str().unwrap_or_default();
        let others = self.genes.as_object().into_iter().flatten().filter(|(gene, _)| *gene != "family");
        let others: Vec<String> = others.map(|(gene, value)| format!(" {gene}={value}")).collect();
        write!(f, ", {family}{}", others.concat())
    }
}
