"""What a job is (spec, shapes, layout, catalogue) and the cluster that it is planned for."""
