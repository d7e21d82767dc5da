"""Foreword under other systems."""
