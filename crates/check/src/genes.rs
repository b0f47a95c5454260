//! Sets genes of a plan by their serde names, so that variations of a plan can be given as data.

use kernels::Plan;
use serde_json::{Value, json};

/// Why a plan cannot have the given genes.
#[derive(Debug, thiserror::Error)]
pub enum GeneError {
    #[error("invalid value '{0}' for genes: expected an object as in {{\"block_n\":128}}")]
    NotGenes(Value),
    #[error("invalid value '{gene}' for a gene of family {family}: expected one of {accepted}")]
    Unknown {
        gene: String,
        family: &'static str,
        /// The family's genes.
        accepted: String,
    },
    /// A gene cannot have the given value.
    #[error("genes {genes}: {error}")]
    Value {
        /// All given genes.
        genes: Value,
        error: serde_json::Error,
    },
}

/// Replaces genes of a plan. [`Plan::check`] says whether the new plan fits a problem.
///
/// # Errors
/// When the family has no such gene, or the gene no such value.
pub fn with_genes(plan: &Plan, genes: &Value) -> Result<Plan, GeneError> {
    let changes = genes.as_object().ok_or_else(|| GeneError::NotGenes(genes.clone()))?;
    let mut whole = json!(plan);
    for (gene, value) in changes {
        let Some(place) = whole.get_mut(gene) else {
            let names = whole.as_object().into_iter().flatten().map(|(name, _)| name.as_str());
            let accepted = names.filter(|name| *name != "family").collect::<Vec<_>>().join(", ");
            return Err(GeneError::Unknown { gene: gene.clone(), family: plan.family(), accepted });
        };
        *place = value.clone();
    }
    serde_json::from_value(whole).map_err(|error| GeneError::Value { genes: genes.clone(), error })
}

/// The Cartesian product of lists of gene objects.
pub fn product(lists: &[Vec<Value>]) -> Vec<Value> {
    lists.iter().fold(vec![json!({})], |all, list| {
        let join = |a: &Value, b: &Value| {
            let mut both = a.clone();
            if let (Value::Object(both), Value::Object(b)) = (&mut both, b) {
                both.extend(b.clone());
            }
            both
        };
        all.iter().flat_map(|a| list.iter().map(move |b| join(a, b))).collect()
    })
}

/// The values of one gene, each as an object.
pub fn values<T: Into<Value>>(gene: &str, values: impl IntoIterator<Item = T>) -> Vec<Value> {
    values.into_iter().map(|value| json!({ gene: value.into() })).collect()
}

#[cfg(test)]
mod tests {
    use kernels::{Arch, Family};
    use problem::Problem;

    use super::*;

    #[test]
    fn genes_by_name() {
        let plan = Family::Mma.default_for(&Problem::mission(), &Arch::SM_90).unwrap();
        let Plan::Mma(changed) = with_genes(&plan, &json!({ "block_n": 48, "queries": "shared" })).unwrap()
        else {
            panic!("another family")
        };
        assert_eq!((changed.block_n, changed.queries), (48, kernels::forward::mma::QueryHome::Shared));
        assert_eq!(with_genes(&plan, &json!({})).unwrap(), plan);
        for (genes, message) in [
            (
                json!({ "block_x": 1 }),
                "invalid value 'block_x' for a gene of family mma: expected one of block_m, block_n",
            ),
            (json!({ "block_n": "many" }), "invalid type: string \"many\""),
            (json!(7), "expected an object"),
        ] {
            let error = with_genes(&plan, &genes).unwrap_err().to_string();
            assert!(error.contains(message), "{error}");
        }
    }

    #[test]
    fn products_hold_every_combination() {
        let all = product(&[values("a", [1, 2]), values("b", ["x", "y", "z"])]);
        assert_eq!(all.len(), 6);
        assert_eq!((&all[0], &all[5]), (&json!({ "a": 1, "b": "x" }), &json!({ "a": 2, "b": "z" })));
        assert_eq!(product(&[]), [json!({})]);
    }
}
