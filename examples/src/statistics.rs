//! Statistics of measured times.

/// The middle one of `values`, the mean of the middle two where their number is even; NaN without any.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => f64::NAN,
        n => (values[(n - 1) / 2] + values[n / 2]) / 2.0,
    }
}

/// The least of `values`; infinite without any.
pub fn least(values: &[f64]) -> f64 {
    values.iter().copied().fold(f64::INFINITY, f64::min)
}

#[cfg(test)]
mod tests {
    use super::{least, median};

    #[test]
    fn medians_of_odd_and_even_numbers_and_the_least() {
        assert_eq!(median(vec![3.0, 1.0, 100.0]), 3.0);
        assert_eq!(median(vec![4.0, 1.0, 2.0, 100.0]), 3.0);
        assert!(median(Vec::new()).is_nan());
        assert_eq!(least(&[4.0, 1.0, 2.0]), 1.0);
    }
}
